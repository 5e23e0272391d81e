// Tokens by iterations: a column per token, its computed iterations filled from below, the reused ones hatched.
// It is also the list of tokens: focus it, and the arrow keys move through them. Columns stand in blocks, so that the
// browser leaves alone what is scrolled out of view.

import { attribute, h, onPointer } from "./dom.js";
import { figure, spoken, visible } from "./spelling.js";

const LONGEST = 12;
const BLOCK = 24; // columns

function described(token, slot, deepest) {
  const times = token.depth === 1 ? "once" : `${token.depth} times`;
  const loss = token.nll === null || token.nll === undefined ? "" : `, surprise ${figure(token.nll)} nats`;
  const reads = token.depth ? `, read ${times} of ${deepest}` : ", not read yet";
  return `${spoken(token.text)}: token ${slot + 1}${reads}${loss}`;
}

export class Grid {
  /** `hovered(slot)`, `selected(slot)`; `name` tells the two grids of a comparison apart. */
  constructor(element, { name, hovered, selected }) {
    Object.assign(this, { element, name, selected, shown: [], columns: [], lit: {}, current: null });
    attribute(element, "role", "listbox");
    attribute(element, "aria-orientation", "horizontal");
    attribute(element, "tabindex", "0");
    const slot = (event) => {
      const column = event.target.closest?.(".column");
      return column ? Number(column.dataset.slot) : null;
    };
    onPointer(element, (event) => hovered(slot(event)));
    element.addEventListener("mouseleave", () => hovered(null));
    element.addEventListener("click", (event) => slot(event) !== null && selected(slot(event)));
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("focus", () => {
      // A pointer chooses its own column.
      if (!element.matches(":focus-visible")) return;
      if (this.current === null && this.shown.length) selected(0);
      else this.reveal();
    });
  }

  key(event) {
    const last = this.shown.length - 1;
    const here = this.current ?? -1;
    const steps = { ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: here + 1, ArrowUp: here - 1 };
    const jumps = { Home: 0, End: last, PageDown: here + 10, PageUp: here - 10 };
    const to = { ...steps, ...jumps }[event.key];
    if (to === undefined || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.selected(Math.min(last, Math.max(0, to)));
  }

  /** Draws the tokens; columns that stay the same are left alone. */
  show(tokens, deepest) {
    const { columns } = this;
    tokens.forEach((token, slot) => {
      let column = columns[slot];
      const before = this.shown[slot];
      const same = before && before.text === token.text && before.depth === token.depth && before.nll === token.nll;
      if (column && same && deepest === this.deepest) return;
      if (!column) {
        column = h("div", { class: "column", role: "option", id: `${this.name}-${slot}`, "data-slot": slot });
        column.append(h("span", { class: "well" }), h("span", { class: "label" }));
        if (slot % BLOCK === 0) this.element.append(h("div", { class: "block", role: "presentation" }));
        this.element.lastChild.append(column);
        columns.push(column);
        this.measure();
      }
      const label = visible(token.text, LONGEST);
      if (column.lastChild.textContent !== label) column.lastChild.textContent = label;
      attribute(column, "data-depth", token.depth || null);
      column.style.setProperty("--read", token.depth || 0);
      attribute(column, "aria-label", described(token, slot, deepest));
    });
    while (columns.length > tokens.length) {
      columns.pop().remove();
      if (columns.length % BLOCK === 0) this.element.lastChild.remove();
      this.measure();
    }
    // Copies: a text that is being written changes its tokens.
    this.shown = tokens.map(({ text, depth, nll }) => ({ text, depth, nll }));
    this.deepest = deepest;
    this.light(this.current, "selected");
  }

  /** Tells the last block its width, which it has out of view too. */
  measure() {
    const block = this.element.lastChild;
    block?.style.setProperty("--columns", block.childElementCount);
  }

  /** Lights the column of a slot up. */
  light(slot, name) {
    const column = slot === null ? undefined : this.columns[slot];
    const before = this.lit[name];
    if (before !== column) {
      before?.classList.remove(name);
      if (name === "selected" && before) attribute(before, "aria-selected", "false");
      column?.classList.add(name);
      this.lit[name] = column;
    }
    if (name !== "selected") return;
    this.current = column ? slot : null;
    if (column) attribute(column, "aria-selected", "true");
    attribute(this.element, "aria-activedescendant", column ? column.id : null);
  }

  /** Scrolls sideways, and only sideways, until the selected column is seen. */
  reveal() {
    const column = this.current === null ? null : this.columns[this.current];
    if (!column) return;
    const frame = this.element;
    const { left: edge, width } = column.getBoundingClientRect();
    const left = edge - frame.getBoundingClientRect().left + frame.scrollLeft;
    if (left < frame.scrollLeft + width) frame.scrollLeft = left - 4 * width;
    else if (left > frame.scrollLeft + frame.clientWidth - 2 * width) frame.scrollLeft = left - frame.clientWidth + 5 * width;
  }
}
