// Compares a second rule, B, with A on the same text.

import * as api from "./api.js";
import { Dial, matchDepth } from "./dial.js";
import { byId, onPointer } from "./dom.js";
import { Grid } from "./grid.js";
import { annotate } from "./puzzle.js";
import { Scorer, scoreRequest } from "./scorer.js";
import { offeredRules, defaultRule } from "./rules.js";
import { set, state } from "./state.js";
import { summarise } from "./summary.js";
import { pieces, Spans } from "./text.js";

export class Comparison {
  /** `first()` returns the scores of rule A; `onDraw()` is called when the scores of B have changed. */
  constructor({ onHover, onSelect, notice, first, onDraw }) {
    Object.assign(this, { notice, first, scores: null, model: null });
    this.spans = new Spans(byId("copy"));
    this.grid = new Grid(byId("grid-b"), { name: "b", onHover, onSelect });
    this.scorer = new Scorer({
      onScores: (answer) => {
        this.scores = annotate(answer, this.model);
        this.draw();
        onDraw();
      },
      onFailure: (failure, wait) => failure && notice(failure, wait),
    });
    this.dial = new Dial(byId("dial-b"), { name: "B", onChange: (rule) => set({ b: rule }), onMatch: () => this.match() });
    const copy = byId("copy");
    onPointer(copy, (event) => onHover(this.spans.slotAt(event.clientX, event.clientY)));
    copy.addEventListener("mouseleave", () => onHover(null));
    copy.addEventListener("click", (event) => {
      const slot = this.spans.slotAt(event.clientX, event.clientY);
      if (slot !== null) onSelect(slot);
    });
    const sheets = [...document.querySelectorAll(".sheet")];
    sheets.forEach((sheet, index) => {
      sheet.addEventListener("scroll", () => {
        if (state.b) sheets[1 - index].scrollTop = sheet.scrollTop;
      });
    });
    byId("compare").addEventListener("click", () => set({ b: state.b ? null : this.defaultSecond() }));
    byId("by-depth").addEventListener("click", () => set({ difference: false }));
    byId("by-difference").addEventListener("click", () => set({ difference: true }));
  }

  /** Returns the rule B with which a comparison starts: of another kind than A if this model offers one. */
  defaultSecond() {
    const words = offeredRules(this.model);
    const first = state.a.split(":")[0];
    return defaultRule(["fixed", ...words].find((word) => words.includes(word) && word !== first) ?? first, this.model);
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
      else this.scores = null;
    }
    if (names.has("difference")) {
      byId("by-depth").setAttribute("aria-pressed", String(!state.difference));
      byId("by-difference").setAttribute("aria-pressed", String(state.difference));
    }
    if (names.has("text")) this.scores = null;
    if (on) this.draw();
  }

  requestScores() {
    this.scorer.request(state.b && state.text ? scoreRequest(state, state.b) : null);
  }

  /** Returns B's rule and scores; `null` without a comparison and before its first scores. */
  shown() {
    return state.b && this.scores ? { rule: state.b, scores: this.scores } : null;
  }

  draw() {
    if (!state.b || !this.model) return;
    const maxDepth = this.model.iterations;
    const tokens = this.scores?.tokens ?? [];
    const first = this.first();
    const others = first?.tokens.length === tokens.length ? first.tokens : [];
    const differs = (slot) => {
      const gap = others[slot]?.depth ? tokens[slot].depth - others[slot].depth : 0;
      return gap > 0 ? "more" : gap < 0 ? "less" : null;
    };
    byId("copy").classList.toggle("difference", state.difference);
    this.spans.show(pieces(state.text, tokens, (slot) => ({ differs: differs(slot), forced: state.forced[slot] })), maxDepth);
    this.grid.show(tokens, maxDepth);
    this.highlight(state.selected, "selected");
    summarise(byId("summary-b"), this.scores, maxDepth, others.length ? first : null);
    const [more, less] = ["more", "less"].map((kind) => tokens.filter((_, slot) => differs(slot) === kind).length);
    byId("differs").textContent = others.length
      ? `B reads ${more} tokens more often than A (▴), ${less} less often (▾) and ${tokens.length - more - less} equally often.`
      : "";
  }

  highlight(slot, name) {
    this.spans.highlight(slot, name);
    this.grid.highlight(slot, name);
  }

  reveal() {
    this.grid.reveal();
  }

  /** Moves B's slider until its mean depth on this text is as near as possible to A's. */
  async match() {
    const target = this.first()?.mean_depth;
    if (!target || !state.text) return;
    const button = byId("match");
    button.disabled = true;
    try {
      const measure = async (rule) => (await api.score(scoreRequest(state, rule))).mean_depth;
      set({ b: await matchDepth(state.b, this.model, target, measure) });
    } catch (failure) {
      this.notice(failure);
    } finally {
      button.disabled = false;
    }
  }
}
