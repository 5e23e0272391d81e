// The dial of one rule: which rule, and how deep; to the right is always deeper.

import { attribute, h, put } from "./dom.js";
import { offered, parse, place, told, turned, usual } from "./rules.js";

const STEPS = 1000;

export class Dial {
  /** `turnedTo(rule)` is called with the rule that was chosen; `match()` where there is another one to match. */
  constructor(element, { name, turnedTo, match = null }) {
    Object.assign(this, { element, name, turnedTo, match, rule: null, model: null });
  }

  /** Draws the dial once the model is known. */
  open(model) {
    this.model = model;
    this.choice = h(
      "select",
      { id: `${this.name}-rule`, onchange: () => this.turnedTo(usual(this.choice.value, model)) },
      offered(model).map((word) => h("option", { value: word }, parse(word).name)),
    );
    this.slider = h("input", { type: "range", id: `${this.name}-dial`, min: 0, max: STEPS, step: 1 });
    this.slider.addEventListener("input", () => this.turnedTo(turned(this.rule, this.slider.value / this.slider.max, model)));
    this.value = h("output", { class: "reading", for: `${this.name}-dial` });
    this.sentence = h("p", { class: "quiet sentence", id: `${this.name}-sentence` });
    this.ends = h("div", { class: "slide" }, h("span", {}, "shallow"), this.slider, h("span", {}, "deep"));
    put(
      this.element,
      h("label", { class: "sr", for: `${this.name}-rule` }, `Rule ${this.name}`),
      this.choice,
      h("label", { class: "sr", for: `${this.name}-dial` }, `Depth by rule ${this.name}`),
      this.match && h("button", { type: "button", class: "match", id: "match", "data-tip": "Turns this dial until both texts have the same mean depth", onclick: this.match }, "Equal budget"),
      this.ends,
      this.value,
      this.sentence,
    );
  }

  /** Shows a rule. */
  show(rule) {
    if (!this.model || !rule) return;
    this.rule = rule;
    const { word, value, text, scale, symbol, steps, meaning } = parse(rule);
    const { sentence } = told(rule);
    this.choice.value = word;
    this.ends.hidden = !scale;
    this.value.textContent = scale ? `${symbol} ${Number.isFinite(value) ? value : text}` : "";
    attribute(this.value, "data-tip", meaning ?? null);
    attribute(this.value, "tabindex", meaning ? 0 : null);
    this.sentence.textContent = `${sentence[0].toUpperCase()}${sentence.slice(1)}.`;
    const most = steps ? Math.max(1, steps(this.model)) : STEPS;
    this.slider.max = String(most);
    if (scale) this.slider.value = String(Math.round(place(rule, this.model) * most));
    this.slider.setAttribute("aria-valuetext", sentence);
  }
}

/**
 * Returns the rule of the same kind whose mean depth on a text is nearest to `target`, by at most `tries` bisections of
 * the dial. `measure(rule)` resolves to a mean depth; deeper is always to the right.
 */
export async function equalBudget(rule, model, target, measure, tries = 11) {
  const { scale, steps } = parse(rule);
  if (!scale) return rule;
  if (steps) {
    const all = Array.from({ length: model.iterations }, (_, index) => `${parse(rule).word}:${index + 1}`);
    return all.reduce((best, other) => (Math.abs(parse(other).value - target) < Math.abs(parse(best).value - target) ? other : best));
  }
  let [low, high] = [0, 1];
  let best = null;
  for (let tried = 0; tried < tries; tried += 1) {
    const candidate = turned(rule, (low + high) / 2, model);
    const depth = await measure(candidate);
    if (!best || Math.abs(depth - target) < Math.abs(best.depth - target)) best = { rule: candidate, depth };
    if (Math.abs(depth - target) < 0.005) break;
    if (depth < target) low = (low + high) / 2;
    else high = (low + high) / 2;
  }
  return best.rule;
}
