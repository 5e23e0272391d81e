// The controls of one rule: a menu that selects it, and a slider from shallow to deep.

import { h, setAttribute, setChildren } from "./dom.js";
import { defaultRule, describe, offeredRules, parseRule, positionOf, ruleAt } from "./rules.js";

const STEPS = 1000;

export class Dial {
  /** `onChange(rule)` receives the visitor's choice; `onMatch`, if given, is the action of a button "Match depth". */
  constructor(element, { name, onChange, onMatch = null }) {
    Object.assign(this, { element, name, onChange, onMatch, rule: null, model: null });
  }

  /** Creates the controls once the model is known. */
  open(model) {
    this.model = model;
    this.menu = h(
      "select",
      { id: `${this.name}-rule`, onchange: () => this.onChange(defaultRule(this.menu.value, model)) },
      offeredRules(model).map((word) => h("option", { value: word }, parseRule(word).name)),
    );
    this.slider = h("input", { type: "range", id: `${this.name}-dial`, min: 0, max: STEPS, step: 1 });
    this.slider.addEventListener("input", () => this.onChange(ruleAt(this.rule, this.slider.value / this.slider.max, model)));
    this.value = h("output", { class: "reading", for: `${this.name}-dial` });
    this.sentence = h("p", { class: "quiet sentence", id: `${this.name}-sentence` });
    this.sliderRow = h("div", { class: "slide" }, h("span", {}, "shallow"), this.slider, h("span", {}, "deep"));
    setChildren(
      this.element,
      h("label", { class: "sr", for: `${this.name}-rule` }, `Rule ${this.name}`),
      this.menu,
      h("label", { class: "sr", for: `${this.name}-dial` }, `Depth under rule ${this.name}`),
      this.onMatch && h("button", { type: "button", class: "match", id: "match", "data-tip": "Moves this slider until B has the mean depth of A on this text", onclick: this.onMatch }, "Match depth"),
      this.sliderRow,
      this.value,
      this.sentence,
    );
  }

  /** Shows a rule's current value. */
  show(rule) {
    if (!this.model || !rule) return;
    this.rule = rule;
    const { word, value, text, scale, symbol, steps, meaning } = parseRule(rule);
    const { sentence } = describe(rule);
    this.menu.value = word;
    this.sliderRow.hidden = !scale;
    this.value.textContent = scale ? `${symbol} ${Number.isFinite(value) ? value : text}` : "";
    setAttribute(this.value, "data-tip", meaning ?? null);
    setAttribute(this.value, "tabindex", meaning ? 0 : null);
    this.sentence.textContent = `${sentence[0].toUpperCase()}${sentence.slice(1)}.`;
    const last = steps ? Math.max(1, steps(this.model)) : STEPS;
    this.slider.max = String(last);
    if (scale) this.slider.value = String(Math.round(positionOf(rule, this.model) * last));
    this.slider.setAttribute("aria-valuetext", sentence);
  }
}

/**
 * Returns the rule of the same kind as `rule` whose mean depth on the text is nearest to `target`, found by at most `tries`
 * bisections of the slider. `measure(rule)` resolves to the mean depth under a rule; fixed depths need no measurement.
 */
export async function matchDepth(rule, model, target, measure, tries = 11) {
  const { scale, steps } = parseRule(rule);
  if (!scale) return rule;
  if (steps) {
    const rules = Array.from({ length: model.iterations }, (_, index) => `${parseRule(rule).word}:${index + 1}`);
    const distance = (candidate) => Math.abs(parseRule(candidate).value - target);
    return rules.reduce((best, candidate) => (distance(candidate) < distance(best) ? candidate : best));
  }
  let [low, high] = [0, 1];
  let best = null;
  for (let attempt = 0; attempt < tries; attempt += 1) {
    const middle = (low + high) / 2;
    const candidate = ruleAt(rule, middle, model);
    const depth = await measure(candidate);
    if (!best || Math.abs(depth - target) < Math.abs(best.depth - target)) best = { rule: candidate, depth };
    if (Math.abs(depth - target) < 0.005) break;
    if (depth < target) low = middle;
    else high = middle;
  }
  return best.rule;
}
