// A second rule on the same text, beside the first, with what differs.

import * as api from "./api.js";
import { Dial, equalBudget } from "./dial.js";
import { byId, onPointer } from "./dom.js";
import { Grid } from "./grid.js";
import { marked } from "./puzzle.js";
import { question, Reader } from "./reader.js";
import { offered, usual } from "./rules.js";
import { set, state } from "./state.js";
import { summarise } from "./summary.js";
import { pieces, Spans } from "./text.js";

export class Comparison {
  constructor({ hovered, selected, notice, first, drawn }) {
    Object.assign(this, { notice, first, reading: null, model: null });
    this.spans = new Spans(byId("copy"));
    this.grid = new Grid(byId("grid-b"), { name: "b", hovered, selected });
    this.reader = new Reader({
      shown: (answer) => {
        this.reading = marked(answer, this.model);
        this.draw();
        drawn();
      },
      failed: (failure, wait) => failure && notice(failure, wait),
    });
    this.dial = new Dial(byId("dial-b"), { name: "B", turnedTo: (rule) => set({ b: rule }), match: () => this.match() });
    const copy = byId("copy");
    onPointer(copy, (event) => hovered(this.spans.slotAt(event.clientX, event.clientY)));
    copy.addEventListener("mouseleave", () => hovered(null));
    copy.addEventListener("click", (event) => {
      const slot = this.spans.slotAt(event.clientX, event.clientY);
      if (slot !== null) selected(slot);
    });
    const sheets = [...document.querySelectorAll(".sheet")];
    sheets.forEach((sheet, index) => {
      sheet.addEventListener("scroll", () => {
        if (state.b) sheets[1 - index].scrollTop = sheet.scrollTop;
      });
    });
    byId("compare").addEventListener("click", () => set({ b: state.b ? null : this.second() }));
    byId("by-depth").addEventListener("click", () => set({ difference: false }));
    byId("by-difference").addEventListener("click", () => set({ difference: true }));
  }

  /** The rule that a comparison begins with: one that the first is not. */
  second() {
    const words = offered(this.model);
    const first = state.a.split(":")[0];
    return usual(["fixed", ...words].find((word) => words.includes(word) && word !== first) ?? first, this.model);
  }

  open(model) {
    this.model = model;
    byId("compare").hidden = !model.halts;
    this.dial.open(model);
  }

  changed(names) {
    const on = state.b !== null;
    if (names.has("b")) {
      for (const id of ["pane-b", "second", "plot-b"]) byId(id).hidden = !on;
      byId("work").classList.toggle("comparing", on);
      byId("compare").setAttribute("aria-pressed", String(on));
      byId("compare").textContent = on ? "Stop comparing" : "Compare";
      if (on) this.dial.show(state.b);
      else this.reading = null;
    }
    if (names.has("difference")) {
      byId("by-depth").setAttribute("aria-pressed", String(!state.difference));
      byId("by-difference").setAttribute("aria-pressed", String(state.difference));
    }
    if (names.has("text")) this.reading = null;
    if (on) this.draw();
  }

  ask() {
    this.reader.want(state.b && state.text ? question(state, state.b) : null);
  }

  /** What is compared, for export. */
  shown() {
    return state.b && this.reading ? { rule: state.b, reading: this.reading } : null;
  }

  draw() {
    if (!state.b || !this.model) return;
    const deepest = this.model.iterations;
    const mine = this.reading?.tokens ?? [];
    const first = this.first();
    const theirs = first?.tokens.length === mine.length ? first.tokens : [];
    const gap = (slot) => (theirs[slot] && theirs[slot].depth ? mine[slot].depth - theirs[slot].depth : 0);
    const differs = (slot) => {
      const found = gap(slot);
      return found > 0 ? "more" : found < 0 ? "less" : null;
    };
    byId("copy").classList.toggle("difference", state.difference);
    this.spans.show(pieces(state.text, mine, (slot) => ({ differs: differs(slot), forced: state.forced[slot] })), deepest);
    this.grid.show(mine, deepest);
    this.light(state.selected, "selected");
    summarise(byId("summary-b"), this.reading, deepest, theirs.length ? first : null);
    const [more, less] = ["more", "less"].map((kind) => mine.filter((_, slot) => differs(slot) === kind).length);
    byId("differs").textContent = theirs.length
      ? `B reads ${more} tokens more often than A (▴), ${less} less often (▾), ${mine.length - more - less} as often.`
      : "";
  }

  light(slot, name) {
    this.spans.light(slot, name);
    this.grid.light(slot, name);
  }

  reveal() {
    this.grid.reveal();
  }

  /** Turns B's dial until its mean depth on this text is A's, as nearly as it can be. */
  async match() {
    const target = this.first()?.mean_depth;
    if (!target || !state.text) return;
    const button = byId("match");
    button.disabled = true;
    try {
      const measure = async (rule) => (await api.score(question(state, rule))).mean_depth;
      set({ b: await equalBudget(state.b, this.model, target, measure) });
    } catch (failure) {
      this.notice(failure);
    } finally {
      button.disabled = false;
    }
  }
}
