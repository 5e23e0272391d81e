// The text: a text area, in which the browser itself does caret, undo, selection and input methods, above a mirror
// that holds the same characters and carries the colours. Both break lines alike, since nothing in the mirror has width.

import { attribute, h, onPointer, put } from "./dom.js";
import { wear } from "./palette.js";
import { align, hasHidden, parts } from "./spelling.js";

// What a span shows of a piece.
const PARTS = ["text", "slot", "depth", "forced", "written", "differs", "level", "unknown", "verdict"];

/** Fills a span with a token's text; characters without shape get a label that takes no room. */
function spell(span, text) {
  if (span.textContent === text && !span.dataset.parts) return;
  if (!text.includes("\n") && !hasHidden(text)) {
    span.textContent = text;
    delete span.dataset.parts;
    return;
  }
  span.dataset.parts = "yes";
  put(
    span,
    parts(text).map((part) => {
      if (part.end) return h("i", { class: "end" }, part.text);
      return part.name ? h("i", { class: "hidden", "data-name": part.name }, part.text) : part.text;
    }),
  );
}

/** Coloured spans of a text, one per token: the mirror of the editor, and the second text of a comparison. */
export class Spans {
  constructor(element) {
    this.element = element;
    this.pieces = [];
    this.deepest = 0;
  }

  /** Shows pieces `{text, slot, depth, forced, mark}`; spans that stay the same are left alone. */
  show(pieces, deepest) {
    const spans = this.element.children;
    let hidden = 0;
    pieces.forEach((piece, index) => {
      const span = spans[index] ?? this.element.appendChild(h("span", { class: "token" }));
      const before = this.pieces[index];
      // Labels of neighbours without width stand at four places, so that none covers another.
      piece.level = hasHidden(piece.text) ? hidden++ % 4 : null;
      if (before && PARTS.every((part) => before[part] === piece[part]) && deepest === this.deepest) return;
      if (before?.text !== piece.text) spell(span, piece.text);
      wear(span, piece.depth, deepest);
      attribute(span, "data-slot", piece.slot ?? null);
      span.classList.toggle("forced", Boolean(piece.forced));
      span.classList.toggle("written", Boolean(piece.written));
      span.classList.toggle("unknown", Boolean(piece.unknown));
      attribute(span, "data-verdict", piece.verdict ?? null);
      attribute(span, "data-differs", piece.differs ?? null);
      attribute(span, "data-level", piece.level);
    });
    while (spans.length > pieces.length) spans[spans.length - 1].remove();
    this.pieces = pieces;
    this.deepest = deepest;
  }

  /** Lights the spans of a slot up in place of what was lit so. */
  light(slot, name) {
    for (const span of this.element.querySelectorAll(`.${name}`)) span.classList.remove(name);
    if (slot === null) return;
    for (const span of this.element.querySelectorAll(`[data-slot="${slot}"]`)) span.classList.add(name);
  }

  /** The slot whose span lies under a point of the screen; `null` where there is none. */
  slotAt(x, y) {
    for (const element of document.elementsFromPoint(x, y)) {
      const span = element.closest(".token");
      if (span && this.element.contains(span)) return span.dataset.slot === undefined ? null : Number(span.dataset.slot);
    }
    return null;
  }
}

/** Pieces of a text from its tokens: what lies between tokens belongs to none. */
export function pieces(text, tokens, extra = () => ({})) {
  const found = [];
  let place = 0;
  align(text, tokens).forEach(([start, end], slot) => {
    if (start > place) found.push({ text: text.slice(place, start) });
    const { depth, unknown, verdict } = tokens[slot];
    if (end > start) found.push({ text: text.slice(start, end), slot, depth, unknown, verdict, ...extra(slot) });
    place = end;
  });
  if (place < text.length) found.push({ text: text.slice(place) });
  return found;
}

export class Editor {
  /** `edited(text)` after each change by hand, `hovered(slot)`, `selected(slot)` when the caret moves. */
  constructor(area, mirror, { edited, hovered, selected }) {
    this.area = area;
    this.spans = new Spans(mirror);
    this.deepest = 1;
    this.text = "";
    this.before = ""; // the text before the last edit
    area.addEventListener("input", () => {
      this.carry(area.value);
      edited(area.value);
    });
    onPointer(area, (event) => hovered(this.spans.slotAt(event.clientX, event.clientY)));
    area.addEventListener("mouseleave", () => hovered(null));
    let caret = -1;
    const moved = () => {
      if (document.activeElement !== area || area.selectionStart === caret) return;
      caret = area.selectionStart;
      selected(this.slotOf(caret));
    };
    document.addEventListener("selectionchange", moved);
    area.addEventListener("keyup", moved);
    area.addEventListener("click", () => {
      caret = -1;
      moved();
    });
  }

  /** Puts a text in that was not typed. */
  write(text) {
    if (this.area.value !== text) this.area.value = text;
    this.carry(text);
  }

  /** Shows tokens of the very text that stands here. */
  show(tokens, deepest, extra) {
    this.deepest = deepest;
    this.spans.show(pieces(this.text, tokens, extra), deepest);
  }

  /** Takes an edit over into the mirror: colours before and after it stay, what is between waits for its own. */
  carry(text) {
    const old = this.text;
    if (text === old) return;
    this.before = old;
    this.text = text;
    const most = Math.min(old.length, text.length);
    let front = 0;
    while (front < most && old[front] === text[front]) front += 1;
    let back = 0;
    while (back < most - front && old[old.length - 1 - back] === text[text.length - 1 - back]) back += 1;
    const kept = [];
    const after = [];
    let place = 0;
    for (const piece of this.spans.pieces) {
      const end = place + piece.text.length;
      if (end <= front) kept.push(piece);
      else if (place >= old.length - back) after.push(piece);
      place = end;
    }
    const length = (list) => list.reduce((sum, piece) => sum + piece.text.length, 0);
    const middle = text.slice(length(kept), text.length - length(after));
    if (middle) kept.push({ text: middle });
    // Slots behind the edit are other ones until the answer comes.
    this.spans.show([...kept, ...after.map((piece) => ({ ...piece, slot: undefined }))], this.deepest);
  }

  /** The slot of the token that ends at or spans a place in the text. */
  slotOf(caret) {
    let place = 0;
    let last = null;
    for (const piece of this.spans.pieces) {
      const end = place + piece.text.length;
      if (piece.slot !== undefined) last = piece.slot;
      if (caret <= end && (caret > place || caret === 0)) return piece.slot ?? last;
      place = end;
    }
    return last;
  }

  /** Brings a token into view, without moving caret or focus. */
  reveal(slot) {
    const span = this.spans.element.querySelector(`[data-slot="${slot}"]`);
    const sheet = this.area.closest(".sheet");
    if (!span || !sheet) return;
    const [own, frame] = [span.getBoundingClientRect(), sheet.getBoundingClientRect()];
    if (own.top < frame.top) sheet.scrollTop -= frame.top - own.top + own.height;
    else if (own.bottom > frame.bottom) sheet.scrollTop += own.bottom - frame.bottom + own.height;
  }
}
