// The grid of tokens by iterations: a column per token, with computed iterations coloured from below and reused ones hatched.
// It is a listbox: when it has focus, the arrow keys select tokens. Columns are grouped in blocks so that the browser skips
// those that are scrolled out of view.

import { h, onPointer, setAttribute } from "./dom.js";
import { figure, spoken, visible } from "./spelling.js";

const LABEL_LENGTH = 12; // characters
const BLOCK = 24; // columns

function ariaLabel(token, slot, maxDepth) {
  const times = token.depth === 1 ? "once" : `${token.depth} times`;
  const loss = token.nll === null || token.nll === undefined ? "" : `, surprise ${figure(token.nll)} nats`;
  const reads = token.depth ? `, read ${times} (at most ${maxDepth})` : ", not read yet";
  return `${spoken(token.text)}: token ${slot + 1}${reads}${loss}`;
}

export class Grid {
  /** `onHover(slot)` and `onSelect(slot)` receive the visitor's actions; `name` prefixes the ids of columns. */
  constructor(element, { name, onHover, onSelect }) {
    Object.assign(this, { element, name, onSelect, shown: [], columns: [], highlighted: {}, current: null });
    setAttribute(element, "role", "listbox");
    setAttribute(element, "aria-orientation", "horizontal");
    setAttribute(element, "tabindex", "0");
    const slotOf = (event) => {
      const column = event.target.closest?.(".column");
      return column ? Number(column.dataset.slot) : null;
    };
    onPointer(element, (event) => onHover(slotOf(event)));
    element.addEventListener("mouseleave", () => onHover(null));
    element.addEventListener("click", (event) => slotOf(event) !== null && onSelect(slotOf(event)));
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("focus", () => {
      // A click selects the column under the pointer instead.
      if (!element.matches(":focus-visible")) return;
      if (this.current === null && this.shown.length) onSelect(0);
      else this.reveal();
    });
  }

  key(event) {
    const last = this.shown.length - 1;
    const slot = this.current ?? -1;
    const steps = { ArrowRight: slot + 1, ArrowLeft: slot - 1, ArrowDown: slot + 1, ArrowUp: slot - 1 };
    const jumps = { Home: 0, End: last, PageDown: slot + 10, PageUp: slot - 10 };
    const target = { ...steps, ...jumps }[event.key];
    if (target === undefined || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.onSelect(Math.min(last, Math.max(0, target)));
  }

  /** Draws the tokens; unchanged columns are not touched. */
  show(tokens, maxDepth) {
    const { columns } = this;
    tokens.forEach((token, slot) => {
      let column = columns[slot];
      const before = this.shown[slot];
      const same = before && before.text === token.text && before.depth === token.depth && before.nll === token.nll;
      if (column && same && maxDepth === this.maxDepth) return;
      if (!column) {
        column = h("div", { class: "column", role: "option", id: `${this.name}-${slot}`, "data-slot": slot });
        column.append(h("span", { class: "well" }), h("span", { class: "label" }));
        if (slot % BLOCK === 0) this.element.append(h("div", { class: "block", role: "presentation" }));
        this.element.lastChild.append(column);
        columns.push(column);
        this.sizeLastBlock();
      }
      const label = visible(token.text, LABEL_LENGTH);
      if (column.lastChild.textContent !== label) column.lastChild.textContent = label;
      setAttribute(column, "data-depth", token.depth || null);
      column.style.setProperty("--read", token.depth || 0);
      setAttribute(column, "aria-label", ariaLabel(token, slot, maxDepth));
    });
    while (columns.length > tokens.length) {
      columns.pop().remove();
      if (columns.length % BLOCK === 0) this.element.lastChild.remove();
      this.sizeLastBlock();
    }
    // Copies, because generation changes its tokens in place.
    this.shown = tokens.map(({ text, depth, nll }) => ({ text, depth, nll }));
    this.maxDepth = maxDepth;
    this.highlight(this.current, "selected");
  }

  /** Sets the last block's width, which it keeps while its columns are not rendered. */
  sizeLastBlock() {
    const block = this.element.lastChild;
    block?.style.setProperty("--columns", block.childElementCount);
  }

  /** Gives the class `name` to the column of a slot, and to no other. */
  highlight(slot, name) {
    const column = slot === null ? undefined : this.columns[slot];
    const before = this.highlighted[name];
    if (before !== column) {
      before?.classList.remove(name);
      if (name === "selected" && before) setAttribute(before, "aria-selected", "false");
      column?.classList.add(name);
      this.highlighted[name] = column;
    }
    if (name !== "selected") return;
    this.current = column ? slot : null;
    if (column) setAttribute(column, "aria-selected", "true");
    setAttribute(this.element, "aria-activedescendant", column ? column.id : null);
  }

  /** Scrolls the grid sideways until the selected column is in view; the page does not scroll. */
  reveal() {
    const column = this.current === null ? null : this.columns[this.current];
    if (!column) return;
    const frame = this.element;
    const { left: columnEdge, width } = column.getBoundingClientRect();
    const left = columnEdge - frame.getBoundingClientRect().left + frame.scrollLeft;
    if (left < frame.scrollLeft + width) frame.scrollLeft = left - 4 * width;
    else if (left > frame.scrollLeft + frame.clientWidth - 2 * width) frame.scrollLeft = left - frame.clientWidth + 5 * width;
  }
}
