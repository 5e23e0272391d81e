// What a token looks like when it must be seen: spaces, line ends, control and direction marks become visible signs.

const NAMES = new Map([
  [0x00ad, "SHY"], [0x061c, "ALM"], [0x180e, "MVS"], [0x200b, "ZWSP"], [0x200c, "ZWNJ"], [0x200d, "ZWJ"],
  [0x200e, "LRM"], [0x200f, "RLM"], [0x2028, "LS"], [0x2029, "PS"], [0x202a, "LRE"], [0x202b, "RLE"],
  [0x202c, "PDF"], [0x202d, "LRO"], [0x202e, "RLO"], [0x2060, "WJ"], [0x2066, "LRI"], [0x2067, "RLI"],
  [0x2068, "FSI"], [0x2069, "PDI"], [0xfeff, "BOM"], [0x7f, "DEL"],
]);
const C0 = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US";
C0.split(" ").forEach((name, code) => NAMES.set(code, name));
for (let code = 0x80; code < 0xa0; code += 1) NAMES.set(code, `x${code.toString(16).toUpperCase()}`);

// Everything named above but tab and line end, which a text area shows itself.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/u;

const escaped = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/gu;

/** The name of a character that has no shape of its own; `undefined` for others. */
export const nameOf = (character) => NAMES.get(character.codePointAt(0));

export const hasHidden = (text) => HIDDEN.test(text);

/** Parts of a text: `{text}` of plain characters, `{text, name}` of a hidden one, `{text, end: true}` of a line end. */
export function parts(text) {
  const found = [];
  let plain = "";
  const flush = () => {
    if (plain) found.push({ text: plain });
    plain = "";
  };
  for (const character of text) {
    if (character === "\n" || HIDDEN.test(character)) {
      flush();
      found.push(character === "\n" ? { text: character, end: true } : { text: character, name: nameOf(character) });
    } else plain += character;
  }
  flush();
  return found;
}

/** A token as one visible line: `·` for a space, `↵` for a line end, `⇥` for a tab, `‹RLO›` for a hidden character. */
export function visible(text, longest = Infinity) {
  const sound = text.isWellFormed?.() === false ? text.toWellFormed() : text;
  let shown = sound.replace(escaped, (character) => {
    if (character === "\n") return "↵";
    if (character === "\t") return "⇥";
    return `‹${nameOf(character)}›`;
  });
  shown = shown.replace(/ /g, "·");
  if (shown === "") return "‹part›";
  const letters = [...shown];
  return letters.length > longest ? `${letters.slice(0, longest - 1).join("")}…` : shown;
}

/** A token as words for a screen reader. */
export function spoken(text) {
  if (text === "") return "part of a character";
  const named = text.replace(escaped, (character) => {
    if (character === "\n") return " new line ";
    if (character === "\t") return " tab ";
    return ` ${nameOf(character)} `;
  });
  const trimmed = named.trim();
  if (!trimmed) return text.length === 1 ? "space" : `${text.length} spaces`;
  return (text.startsWith(" ") ? "space " : "") + trimmed;
}

/** What a predicted token adds to the text: a part of a character, which the server spells `bytes:\\xe2`, adds nothing yet. */
export const written = (text) => (/^bytes:(\\x[0-9a-f]{2})+$/.test(text) ? "" : text);

const REACH = 16;

function find(text, piece, place) {
  if (text.startsWith(piece, place)) return place;
  const near = text.slice(place, place + piece.length + REACH).indexOf(piece);
  return near < 0 ? -1 : place + near;
}

/**
 * Where each token lies in the text: `[start, end]` in UTF-16 units. A tokenizer may change a text it reads, so a token
 * that is not found where the one before it ended is looked for a little further on, and else has no width.
 */
export function align(text, tokens) {
  let place = 0;
  return tokens.map(({ text: piece, unknown }) => {
    for (const wanted of [piece, piece.trim()]) {
      const start = wanted ? find(text, wanted, place) : -1;
      if (start >= 0) {
        place = start + wanted.length;
        return [start, place];
      }
    }
    // An unknown word does not stand in the text as its token is spelled.
    const word = unknown ? /\S+/u.exec(text.slice(place)) : null;
    if (!word) return [place, place];
    const start = place + word.index;
    place = start + word[0].length;
    return [start, place];
  });
}

/** A number with few digits: 3 that count, thousands with separators. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A small or large number in three significant digits. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) < 0.001) return value.toExponential(2).replace("e-", "e−");
  return String(Number(value.toPrecision(3)));
}

/** Counts with their unit, that of the last: 1.23 GFLOP; `0.67 of 1.30 GFLOP`. */
export function scaled(values, unit, base = 1000) {
  const all = [values].flat();
  const signs = base === 1024 ? ["", "Ki", "Mi", "Gi", "Ti"] : ["", "k", "M", "G", "T", "P"];
  let step = 0;
  while (all.at(-1) >= base ** (step + 1) && step < signs.length - 1) step += 1;
  const whole = all.at(-1) / base ** step;
  const digits = whole >= 100 || step === 0 ? 0 : whole >= 10 ? 1 : 2;
  return `${all.map((value) => figure(value / base ** step, digits)).join(" of ")} ${signs[step]}${unit}`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;
