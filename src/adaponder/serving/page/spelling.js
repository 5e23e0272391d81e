// Formats tokens, with visible signs for spaces, line ends, control and direction characters, and numbers.

const NAMES = new Map([
  [0x00ad, "SHY"], [0x061c, "ALM"], [0x180e, "MVS"], [0x200b, "ZWSP"], [0x200c, "ZWNJ"], [0x200d, "ZWJ"],
  [0x200e, "LRM"], [0x200f, "RLM"], [0x2028, "LS"], [0x2029, "PS"], [0x202a, "LRE"], [0x202b, "RLE"],
  [0x202c, "PDF"], [0x202d, "LRO"], [0x202e, "RLO"], [0x2060, "WJ"], [0x2066, "LRI"], [0x2067, "RLI"],
  [0x2068, "FSI"], [0x2069, "PDI"], [0xfeff, "BOM"], [0x7f, "DEL"],
]);
const C0 = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US";
C0.split(" ").forEach((name, code) => NAMES.set(code, name));
for (let code = 0x80; code < 0xa0; code += 1) NAMES.set(code, `x${code.toString(16).toUpperCase()}`);

// All characters named above except tab and line end, which a text area shows.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/u;

// The hidden characters, tab and line end.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/gu;

/** Returns the name of an invisible character, `undefined` for others. */
const nameOf = (character) => NAMES.get(character.codePointAt(0));

export const hasHidden = (text) => HIDDEN.test(text);

/** Splits a text into `{text}` for visible characters, `{text, name}` for a hidden one and `{text, end: true}` for a line end. */
export function parts(text) {
  const result = [];
  let plain = "";
  const flush = () => {
    if (plain) result.push({ text: plain });
    plain = "";
  };
  for (const character of text) {
    if (character === "\n" || HIDDEN.test(character)) {
      flush();
      result.push(character === "\n" ? { text: character, end: true } : { text: character, name: nameOf(character) });
    } else plain += character;
  }
  flush();
  return result;
}

/** Returns a token on one line: `·` for a space, `↵` for a line end, `⇥` for a tab, `‹RLO›` for a hidden character. */
export function visible(text, longest = Infinity) {
  const wellFormed = text.isWellFormed?.() === false ? text.toWellFormed() : text;
  let shown = wellFormed.replace(INVISIBLE, (character) => {
    if (character === "\n") return "↵";
    if (character === "\t") return "⇥";
    return `‹${nameOf(character)}›`;
  });
  shown = shown.replace(/ /g, "·");
  if (shown === "") return "‹part›";
  const letters = [...shown];
  return letters.length > longest ? `${letters.slice(0, longest - 1).join("")}…` : shown;
}

/** Returns a token in words for a screen reader. */
export function spoken(text) {
  if (text === "") return "part of a character";
  const named = text.replace(INVISIBLE, (character) => {
    if (character === "\n") return " new line ";
    if (character === "\t") return " tab ";
    return ` ${nameOf(character)} `;
  });
  const trimmed = named.trim();
  if (!trimmed) return text.length === 1 ? "space" : `${text.length} spaces`;
  return (text.startsWith(" ") ? "space " : "") + trimmed;
}

/** Returns what a predicted token adds to the text: nothing if it is part of a character, which the server spells `bytes:\\xe2`. */
export const textOf = (text) => (/^bytes:(\\x[0-9a-f]{2})+$/.test(text) ? "" : text);

const REACH = 16; // how many characters after the previous token's end a token is searched for

function find(text, piece, start) {
  if (text.startsWith(piece, start)) return start;
  const offset = text.slice(start, start + piece.length + REACH).indexOf(piece);
  return offset < 0 ? -1 : start + offset;
}

/**
 * Returns the span of each token in the text, `[start, end]` in UTF-16 units. Tokenizers may normalise the text, so a token that
 * does not follow the previous one directly is searched in the next `REACH` characters; one that is not found has an empty span.
 */
export function align(text, tokens) {
  let position = 0;
  return tokens.map(({ text: piece, unknown }) => {
    for (const candidate of [piece, piece.trim()]) {
      const start = candidate ? find(text, candidate, position) : -1;
      if (start >= 0) {
        position = start + candidate.length;
        return [start, position];
      }
    }
    // The token for unknown words covers the next word, whatever it is.
    const word = unknown ? /\S+/u.exec(text.slice(position)) : null;
    if (!word) return [position, position];
    const start = position + word.index;
    position = start + word[0].length;
    return [start, position];
  });
}

/** Formats a number with `digits` decimals and with thousands separators. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Formats a number with three significant digits. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) < 0.001) return value.toExponential(2).replace("e-", "e−");
  return String(Number(value.toPrecision(3)));
}

/** Formats one count or several, with the unit prefix that suits the last of them: `1.23 GFLOP`, `0.67 of 1.30 GFLOP`. */
export function scaled(values, unit, base = 1000) {
  const all = [values].flat();
  const prefixes = base === 1024 ? ["", "Ki", "Mi", "Gi", "Ti"] : ["", "k", "M", "G", "T", "P"];
  let step = 0;
  while (all.at(-1) >= base ** (step + 1) && step < prefixes.length - 1) step += 1;
  const last = all.at(-1) / base ** step;
  const digits = last >= 100 || step === 0 ? 0 : last >= 10 ? 1 : 2;
  return `${all.map((value) => figure(value / base ** step, digits)).join(" of ")} ${prefixes[step]}${unit}`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;
