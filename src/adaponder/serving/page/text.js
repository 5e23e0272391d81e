// The editor: a text area, for which the browser provides caret, undo, selection and input methods, above a mirror that shows
// the same characters with colours. Both break lines alike, because labels and marks in the mirror take up no width.

import { h, onPointer, setAttribute, setChildren } from "./dom.js";
import { showDepth } from "./palette.js";
import { align, hasHidden, parts } from "./spelling.js";

// Fields of a piece that change how its span looks.
const FIELDS = ["text", "slot", "depth", "forced", "differs", "level", "unknown", "verdict"];

/** Sets a span's text; invisible characters get a label without width. */
function setText(span, text) {
  if (span.textContent === text && !span.dataset.parts) return;
  if (!text.includes("\n") && !hasHidden(text)) {
    span.textContent = text;
    delete span.dataset.parts;
    return;
  }
  span.dataset.parts = "yes";
  setChildren(
    span,
    parts(text).map((part) => {
      if (part.end) return h("i", { class: "end" }, part.text);
      return part.name ? h("i", { class: "hidden", "data-name": part.name }, part.text) : part.text;
    }),
  );
}

/** A text as coloured spans, one per token: the mirror of the editor, or text B of a comparison. */
export class Spans {
  constructor(element) {
    this.element = element;
    this.pieces = [];
    this.maxDepth = 0;
  }

  /** Shows pieces, as from `pieces()`; unchanged spans are not touched. */
  show(pieces, maxDepth) {
    const spans = this.element.children;
    let hiddenCount = 0;
    pieces.forEach((piece, index) => {
      const span = spans[index] ?? this.element.appendChild(h("span", { class: "token" }));
      const before = this.pieces[index];
      // Labels of neighbouring invisible characters alternate between four positions, so that they do not overlap.
      piece.level = hasHidden(piece.text) ? hiddenCount++ % 4 : null;
      if (before && FIELDS.every((field) => before[field] === piece[field]) && maxDepth === this.maxDepth) return;
      if (before?.text !== piece.text) setText(span, piece.text);
      showDepth(span, piece.depth, maxDepth);
      setAttribute(span, "data-slot", piece.slot ?? null);
      span.classList.toggle("forced", Boolean(piece.forced));
      span.classList.toggle("unknown", Boolean(piece.unknown));
      setAttribute(span, "data-verdict", piece.verdict ?? null);
      setAttribute(span, "data-differs", piece.differs ?? null);
      setAttribute(span, "data-level", piece.level);
    });
    while (spans.length > pieces.length) spans[spans.length - 1].remove();
    this.pieces = pieces;
    this.maxDepth = maxDepth;
  }

  /** Gives the class `name` to the spans of a slot, and to no others. */
  highlight(slot, name) {
    for (const span of this.element.querySelectorAll(`.${name}`)) span.classList.remove(name);
    if (slot === null) return;
    for (const span of this.element.querySelectorAll(`[data-slot="${slot}"]`)) span.classList.add(name);
  }

  /** Returns the slot of the span at a point of the screen, `null` if there is none. */
  slotAt(x, y) {
    for (const element of document.elementsFromPoint(x, y)) {
      const span = element.closest(".token");
      if (span && this.element.contains(span)) return span.dataset.slot === undefined ? null : Number(span.dataset.slot);
    }
    return null;
  }
}

/** Splits a text into one piece per token, with the token's fields and `extra(slot)`; text between tokens has no slot. */
export function pieces(text, tokens, extra) {
  const result = [];
  let covered = 0;
  align(text, tokens).forEach(([start, end], slot) => {
    if (start > covered) result.push({ text: text.slice(covered, start) });
    const { depth, unknown, verdict } = tokens[slot];
    if (end > start) result.push({ text: text.slice(start, end), slot, depth, unknown, verdict, ...extra(slot) });
    covered = end;
  });
  if (covered < text.length) result.push({ text: text.slice(covered) });
  return result;
}

export class Editor {
  /** Calls `onEdit(text)` after each edit by the visitor, `onSelect(slot)` when the caret moves. */
  constructor(area, mirror, { onEdit, onHover, onSelect }) {
    this.area = area;
    this.spans = new Spans(mirror);
    this.maxDepth = 1;
    this.text = "";
    this.textBeforeEdit = "";
    area.addEventListener("input", () => {
      this.updateMirror(area.value);
      onEdit(area.value);
    });
    onPointer(area, (event) => onHover(this.spans.slotAt(event.clientX, event.clientY)));
    area.addEventListener("mouseleave", () => onHover(null));
    let caret = -1;
    const onCaret = () => {
      if (document.activeElement !== area || area.selectionStart === caret) return;
      caret = area.selectionStart;
      onSelect(this.slotOf(caret));
    };
    document.addEventListener("selectionchange", onCaret);
    area.addEventListener("keyup", onCaret);
    area.addEventListener("click", () => {
      caret = -1;
      onCaret();
    });
  }

  /** Replaces the text with one that was not typed. */
  setText(text) {
    if (this.area.value !== text) this.area.value = text;
    this.updateMirror(text);
  }

  /** Colours the current text by its tokens. */
  show(tokens, maxDepth, extra) {
    this.maxDepth = maxDepth;
    this.spans.show(pieces(this.text, tokens, extra), maxDepth);
  }

  /** Copies an edit into the mirror; text before and after the edit keeps its colours until the next scores. */
  updateMirror(text) {
    const old = this.text;
    if (text === old) return;
    this.textBeforeEdit = old;
    this.text = text;
    const shorter = Math.min(old.length, text.length);
    let prefix = 0;
    while (prefix < shorter && old[prefix] === text[prefix]) prefix += 1;
    let suffix = 0;
    while (suffix < shorter - prefix && old[old.length - 1 - suffix] === text[text.length - 1 - suffix]) suffix += 1;
    const before = [];
    const after = [];
    let start = 0;
    for (const piece of this.spans.pieces) {
      const end = start + piece.text.length;
      if (end <= prefix) before.push(piece);
      else if (start >= old.length - suffix) after.push(piece);
      start = end;
    }
    const length = (list) => list.reduce((sum, piece) => sum + piece.text.length, 0);
    const middle = text.slice(length(before), text.length - length(after));
    if (middle) before.push({ text: middle });
    // Slots after the edit are unknown until the next scores.
    this.spans.show([...before, ...after.map((piece) => ({ ...piece, slot: undefined }))], this.maxDepth);
  }

  /** Returns the slot of the token that contains the character before the caret. */
  slotOf(caret) {
    let start = 0;
    let last = null;
    for (const piece of this.spans.pieces) {
      const end = start + piece.text.length;
      if (piece.slot !== undefined) last = piece.slot;
      if (caret <= end && (caret > start || caret === 0)) return piece.slot ?? last;
      start = end;
    }
    return last;
  }

  /** Scrolls a token into view without moving caret or focus. */
  reveal(slot) {
    const span = this.spans.element.querySelector(`[data-slot="${slot}"]`);
    const sheet = this.area.closest(".sheet");
    if (!span || !sheet) return;
    const [token, frame] = [span.getBoundingClientRect(), sheet.getBoundingClientRect()];
    if (token.top < frame.top) sheet.scrollTop -= frame.top - token.top + token.height;
    else if (token.bottom > frame.bottom) sheet.scrollTop += token.bottom - frame.bottom + token.height;
  }
}
