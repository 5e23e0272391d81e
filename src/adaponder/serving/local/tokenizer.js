// Reads a `tokenizer.json` of two kinds: byte-level BPE with GPT-2's pattern, and whole words between spaces. The command
// that writes the page refuses every other kind.

// Rust's classes: \s in JavaScript has U+FEFF and lacks U+0085.
const GPT2 =
  /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
const UNFINISHED = "\ufffd";
// Tokens that wait for the end of a character, and how many of them can belong to one.
const [MOST_WAITING, OF_A_CHARACTER] = [12, 3];

const decoded = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));

/** Characters of byte-level vocabularies by byte: printable Latin-1 stands for itself, U+0100 … for the other bytes. */
function alphabet() {
  const plain = (byte) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte !== 0xad);
  let other = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(plain(byte) ? byte : other++));
}

const LETTERS = alphabet();
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));

/** A pattern that finds any of these texts, the longest first; `null` for none. */
function oneOf(texts) {
  const longest = texts.sort((a, b) => b.length - a.length).map((text) => text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
  return longest.length ? new RegExp(`(${longest.join("|")})`, "u") : null;
}

export class Tokenizer {
  constructor({ model, added_tokens: added, normalizer, decoder }) {
    this.words = model.type === "WordLevel";
    this.vocabulary = new Map(Object.entries(model.vocab));
    this.added = new Map(added.map(({ id, content }) => [content, id]));
    this.entries = new Map([...this.vocabulary, ...this.added].map(([entry, id]) => [id, entry]));
    this.unknown = this.vocabulary.get(model.unk_token);
    this.ranks = new Map((model.merges ?? []).map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
    this.form = normalizer?.type; // NFC, or none
    // Entries that are looked for before and after the text is normalised.
    this.before = oneOf(added.filter((token) => !token.normalized).map((token) => token.content));
    this.after = oneOf(added.filter((token) => token.normalized).map((token) => token.content));
    this.decodes = Boolean(decoder);
    this.known = new Map(); // ids by piece of text
  }

  /** The token ids of a text. */
  encode(text) {
    const ids = [];
    const split = (part, pattern, rest) => {
      for (const [index, piece] of (pattern ? part.split(pattern) : [part]).entries()) {
        if (index % 2) ids.push(this.added.get(piece));
        else if (piece) rest(piece);
      }
    };
    split(text.toWellFormed?.() ?? text, this.before, (part) => {
      split(this.form ? part.normalize(this.form) : part, this.after, (piece) => {
        if (this.words) for (const word of piece.split(/\p{White_Space}+/u)) word && ids.push(this.vocabulary.get(word) ?? this.unknown);
        else for (const [word] of piece.matchAll(GPT2)) for (const id of this.merged(word)) ids.push(id);
      });
    });
    return ids;
  }

  /** The ids of one word of byte-level BPE: the pair of the lowest rank, then of the leftmost place, is merged first. */
  merged(word) {
    const cached = this.known.get(word);
    if (cached) return cached;
    const parts = [...new TextEncoder().encode(word)].map((byte) => LETTERS[byte]);
    for (;;) {
      let [best, place] = [Infinity, -1];
      for (let at = 0; at + 1 < parts.length; at += 1) {
        const rank = this.ranks.get(`${parts[at]} ${parts[at + 1]}`);
        if (rank < best) [best, place] = [rank, at];
      }
      if (place < 0) break;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
    const ids = parts.map((part) => this.vocabulary.get(part));
    if (this.known.size < 50_000) this.known.set(word, ids);
    return ids;
  }

  bytes(id) {
    return [...(this.entries.get(id) ?? "")].flatMap((letter) => BYTES.get(letter) ?? [...new TextEncoder().encode(letter)]);
  }

  /** Returns a function that gives the text which each next token completes; without a token, what is left. */
  speller() {
    let first = true;
    const waiting = [];
    return (id) => {
      // Without a decoder, whole words stand with one space between them.
      if (!this.decodes) {
        const space = first ? "" : " ";
        first = false;
        return id === undefined ? "" : space + (this.entries.get(id) ?? "");
      }
      if (id !== undefined) waiting.push(id);
      let end = waiting.length;
      if (id !== undefined && decoded(waiting.flatMap((token) => this.bytes(token))).endsWith(UNFINISHED)) {
        if (end < MOST_WAITING) return "";
        end -= OF_A_CHARACTER;
      }
      return decoded(waiting.splice(0, end).flatMap((token) => this.bytes(token)));
    };
  }

  /** The text of each token; a character of several tokens belongs to the one that completes it. */
  pieces(ids) {
    const spell = this.speller();
    const texts = ids.map(spell);
    if (texts.length) texts[texts.length - 1] += spell();
    return texts;
  }

  /** The text of one token by itself; bytes that are no text as `bytes:\xe2`. */
  spelled(id) {
    if (!this.entries.has(id)) return "";
    if (!this.decodes) return this.entries.get(id);
    const bytes = this.bytes(id);
    const text = decoded(bytes);
    if (!text.includes(UNFINISHED)) return text;
    return `bytes:${bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
  }
}
