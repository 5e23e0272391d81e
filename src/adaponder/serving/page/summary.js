// The summary of a scored text: a histogram of depths, which is also the legend of colours, mean depth, loss and savings.

import { h, setChildren } from "./dom.js";
import { showDepth } from "./palette.js";
import { figure, percent, scaled } from "./spelling.js";
import { tipAttributes } from "./tips.js";

/** Returns the number of tokens of each depth 1 … maxDepth. */
export function histogram(tokens, maxDepth) {
  const counts = new Array(maxDepth).fill(0);
  for (const token of tokens) if (token.depth) counts[token.depth - 1] += 1;
  return counts;
}

/** Returns the reason why no token has this depth although some are deeper. */
function whyNone(depth, policy) {
  const why = policy?.startsWith("gate:") ? "every gate computed at this point was at or above its threshold" : "under this rule every token was read again";
  return `No token stopped after ${depth} ${depth === 1 ? "read" : "reads"}: ${why}.`;
}

function bars({ tokens, policy }, maxDepth) {
  const counts = histogram(tokens, maxDepth);
  const highest = Math.max(1, ...counts);
  return counts.map((count, index) => {
    const bar = h("span", { class: "bar", "--share": count / highest });
    const swatch = h("span", { class: "swatch" }, `${index + 1}×`);
    showDepth(bar, index + 1, maxDepth);
    showDepth(swatch, index + 1, maxDepth);
    const label = `${count} of ${tokens.length} tokens are read ${index + 1} ${index ? "times" : "time"}`;
    const why = !count && counts.slice(index + 1).some(Boolean) ? tipAttributes(whyNone(index + 1, policy)) : {};
    return h("li", { "aria-label": label, "data-count": count, ...why }, swatch, bar, h("span", { class: "count" }, String(count)));
  });
}

function stat(name, value, note, meaning) {
  return h(
    "div",
    { class: "stat", "data-stat": name },
    h("dt", {}, h("span", tipAttributes(meaning), name)),
    h("dd", {}, h("span", { class: "value" }, value), h("span", { class: "note" }, note)),
  );
}

const DEPTH = "How many times the model read a token, on average.";
const UNKNOWN = "Words that the tokenizer does not know: the model sees the same token for all of them.";
const LOSS = "How badly the model predicts each token from those before it: the mean negative log-likelihood in nats. Lower is better.";
const ANSWERS = "How badly the model predicts the answers: their mean negative log-likelihood in nats. The rest of a puzzle is random and does not count.";
const MEMORY = "A halted token keeps the keys and values of its last read. Other tokens attend to these in later reads: they are not computed or stored again.";

const saved = (used, full) => (full ? 1 - used / full : 0);
const signed = (value, digits = 2) => {
  const rounded = Number(value.toFixed(digits));
  return `${rounded > 0 ? "+" : rounded < 0 ? "−" : "±"}${figure(Math.abs(rounded), digits)}`;
};

function costs(scores, other, maxDepth) {
  const { usage } = scores;
  const flops = saved(usage.flops, usage.flops_full_depth);
  const memory = saved(usage.kv_bytes, usage.kv_bytes_full_depth);
  const compute = `Used ${scaled([usage.flops, usage.flops_full_depth], "FLOP")}: full depth would read every token ${maxDepth}×. A plain model reads every token once.`;
  let notes = [`vs. full depth; ${figure(usage.flops / usage.flops_vanilla, 1)}× a plain model`, scaled([usage.kv_bytes, usage.kv_bytes_full_depth], "B", 1024)];
  if (other) {
    const points = (share, otherShare) => `${signed(100 * (share - otherShare), 0)} points vs. A`;
    notes = [
      points(flops, saved(other.usage.flops, other.usage.flops_full_depth)),
      points(memory, saved(other.usage.kv_bytes, other.usage.kv_bytes_full_depth)),
    ];
  }
  return [
    ["FLOPs saved", percent(flops), notes[0], compute],
    ["KV cache saved", percent(memory), notes[1], MEMORY],
  ];
}

/** Draws the summary of `scores`; with `other`, the scores of rule A, also the differences from them. */
export function summarise(element, scores, maxDepth, other = null) {
  if (!scores) {
    setChildren(element, h("p", { class: "quiet" }, "The numbers appear once there is a text."));
    return;
  }
  const depthNote = other ? `${signed(scores.mean_depth - other.mean_depth)} vs. A` : `of at most ${maxDepth}`;
  const { answers } = scores;
  const lossOf = (answer) => (answer.answers ?? answer).loss;
  let lossNote = "nats per token";
  if (other) lossNote = `${signed(lossOf(scores) - lossOf(other), 3)} vs. A`;
  else if (scores.full_loss !== null && scores.full_loss !== undefined) lossNote = `${figure(scores.full_loss, 3)} at full depth`;
  if (answers) lossNote = `${answers.right} of ${answers.count} answers right${other ? `; ${lossNote}` : ""}`;
  setChildren(
    element,
    h("ol", { class: "histogram", "aria-label": "Tokens by depth" }, bars(scores, maxDepth)),
    h(
      "dl",
      { class: "stats" },
      stat("Mean depth", figure(scores.mean_depth), depthNote, DEPTH),
      stat("Loss", figure(lossOf(scores), 3), lossNote, answers ? ANSWERS : LOSS),
      ...(scores.unknown_tokens ? [stat("Unknown", String(scores.unknown_tokens), "tokens", UNKNOWN)] : []),
      ...costs(scores, other, maxDepth).map((entry) => stat(...entry)),
    ),
  );
}

/** Returns the summary as one sentence, for screen readers. */
export function sentence(scores, maxDepth) {
  const counts = histogram(scores.tokens, maxDepth).map((count, index) => `${count} at depth ${index + 1}`);
  return `${scores.tokens.length} tokens, mean depth ${figure(scores.mean_depth)}: ${counts.join(", ")}.`;
}
