// Encodes and decodes text with a `tokenizer.json` of one of two kinds: byte-level BPE with GPT-2's pattern, or whole words
// between spaces. `adaponder page` refuses every other kind.

// \p{White_Space} as in Rust: JavaScript's \s includes U+FEFF and lacks U+0085.
const GPT2 =
  /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
const REPLACEMENT = "\ufffd"; // what incomplete bytes decode to
const MAX_PENDING = 12; // tokens that may wait for the end of a character
const PENDING_TAIL = 3; // the most tokens that can belong to one unfinished character

const utf8 = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));

/** The characters that stand for bytes in byte-level vocabularies: printable Latin-1 for itself, U+0100 … for other bytes. */
function byteCharacters() {
  const printable = (byte) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte !== 0xad);
  let other = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : other++));
}

const CHARACTERS = byteCharacters();
const BYTES = new Map(CHARACTERS.map((character, byte) => [character, byte]));

/** Returns a pattern that matches any of these texts, the longest first; `null` for no texts. */
function anyOf(texts) {
  const patterns = texts.sort((a, b) => b.length - a.length).map((text) => text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
  return patterns.length ? new RegExp(`(${patterns.join("|")})`, "u") : null;
}

export class Tokenizer {
  constructor({ model, added_tokens: added, normalizer, decoder }) {
    this.words = model.type === "WordLevel";
    this.vocabulary = new Map(Object.entries(model.vocab));
    this.added = new Map(added.map(({ id, content }) => [content, id]));
    this.entries = new Map([...this.vocabulary, ...this.added].map(([entry, id]) => [id, entry]));
    this.unknown = this.vocabulary.get(model.unk_token);
    this.ranks = new Map((model.merges ?? []).map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
    this.normalForm = normalizer?.type; // "NFC" or undefined
    // Added tokens that are matched before and after the text is normalised.
    this.before = anyOf(added.filter((token) => !token.normalized).map((token) => token.content));
    this.after = anyOf(added.filter((token) => token.normalized).map((token) => token.content));
    this.byteLevel = Boolean(decoder);
    this.cache = new Map(); // ids of words
  }

  /** Returns the token ids of a text. */
  encode(text) {
    const ids = [];
    // Adds the ids of the tokens that the pattern matches, and calls `encodeRest` on the text between them.
    const split = (part, pattern, encodeRest) => {
      for (const [index, piece] of (pattern ? part.split(pattern) : [part]).entries()) {
        if (index % 2) ids.push(this.added.get(piece));
        else if (piece) encodeRest(piece);
      }
    };
    split(text.toWellFormed?.() ?? text, this.before, (part) => {
      split(this.normalForm ? part.normalize(this.normalForm) : part, this.after, (piece) => {
        if (this.words) for (const word of piece.split(/\p{White_Space}+/u)) word && ids.push(this.vocabulary.get(word) ?? this.unknown);
        else for (const [word] of piece.matchAll(GPT2)) for (const id of this.bpe(word)) ids.push(id);
      });
    });
    return ids;
  }

  /** Returns the ids of one word by byte-level BPE: merges the pair of lowest rank first, of equal pairs the leftmost. */
  bpe(word) {
    const cached = this.cache.get(word);
    if (cached) return cached;
    const parts = [...new TextEncoder().encode(word)].map((byte) => CHARACTERS[byte]);
    for (;;) {
      let [bestRank, best] = [Infinity, -1];
      for (let index = 0; index + 1 < parts.length; index += 1) {
        const rank = this.ranks.get(`${parts[index]} ${parts[index + 1]}`);
        if (rank < bestRank) [bestRank, best] = [rank, index];
      }
      if (best < 0) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
    const ids = parts.map((part) => this.vocabulary.get(part));
    if (this.cache.size < 50_000) this.cache.set(word, ids);
    return ids;
  }

  bytes(id) {
    return [...(this.entries.get(id) ?? "")].flatMap((character) => BYTES.get(character) ?? [...new TextEncoder().encode(character)]);
  }

  /** Returns a function that decodes tokens one by one and holds back unfinished characters until it is called without a token. */
  streamDecoder() {
    let first = true;
    const pending = [];
    return (id) => {
      // Whole words are separated by one space.
      if (!this.byteLevel) {
        const space = first ? "" : " ";
        first = false;
        return id === undefined ? "" : space + (this.entries.get(id) ?? "");
      }
      if (id !== undefined) pending.push(id);
      let end = pending.length;
      if (id !== undefined && utf8(pending.flatMap((token) => this.bytes(token))).endsWith(REPLACEMENT)) {
        if (end < MAX_PENDING) return "";
        end -= PENDING_TAIL;
      }
      return utf8(pending.splice(0, end).flatMap((token) => this.bytes(token)));
    };
  }

  /** Returns the text of each token; a character of several tokens belongs to the last of them. */
  pieces(ids) {
    const decode = this.streamDecoder();
    const texts = ids.map(decode);
    if (texts.length) texts[texts.length - 1] += decode();
    return texts;
  }

  /** Returns the text of a single token; bytes that are not UTF-8 as `bytes:\xe2`. */
  spelled(id) {
    if (!this.entries.has(id)) return "";
    if (!this.byteLevel) return this.entries.get(id);
    const bytes = this.bytes(id);
    const text = utf8(bytes);
    if (!text.includes(REPLACEMENT)) return text;
    return `bytes:${bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
  }
}
