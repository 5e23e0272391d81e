// Numbers of a reading: how many tokens have which depth (the legend is the histogram), mean depth, loss, what is saved.

import { h, put } from "./dom.js";
import { wear } from "./palette.js";
import { figure, percent, scaled } from "./spelling.js";

/** Numbers of tokens of depth 1 … deepest. */
export function histogram(tokens, deepest) {
  const counts = new Array(deepest).fill(0);
  for (const token of tokens) if (token.depth) counts[token.depth - 1] += 1;
  return counts;
}

function bars(tokens, deepest) {
  const counts = histogram(tokens, deepest);
  const most = Math.max(1, ...counts);
  return counts.map((count, index) => {
    const bar = h("span", { class: "bar", "--share": count / most });
    const swatch = h("span", { class: "swatch" }, `${index + 1}×`);
    wear(bar, index + 1, deepest);
    wear(swatch, index + 1, deepest);
    let label = `${count} of ${tokens.length} tokens are read ${index + 1} ${index ? "times" : "time"}`;
    if (!count && counts.slice(index + 1).some(Boolean)) {
      label += `: whenever one was read ${index + 1}×, its gate was still at or above the threshold, and it was read again`;
    }
    return h("li", { title: label, "aria-label": label, "data-count": count }, swatch, bar, h("span", { class: "count" }, String(count)));
  });
}

function stat(name, value, note, title) {
  return h(
    "div",
    { class: "stat", "data-stat": name, title },
    h("dt", {}, name),
    h("dd", {}, h("span", { class: "value" }, value), h("span", { class: "note" }, note)),
  );
}

const UNKNOWN = "Text that the tokenizer does not know: the model reads one and the same token for all of it";

const LOSS = "Mean negative log-likelihood of each token given those before it";
const ANSWERS = "Mean negative log-likelihood of the answers; nothing else of a puzzle can be known beforehand";
const KEPT = "A token that halts keeps the keys and values of its last read, and later reads of other tokens use them again";

const saved = (used, full) => (full ? 1 - used / full : 0);
const sign = (value, digits = 2) => {
  const rounded = Number(value.toFixed(digits));
  return `${rounded > 0 ? "+" : rounded < 0 ? "−" : "±"}${figure(Math.abs(rounded), digits)}`;
};

function costs(reading, other, deepest) {
  const { usage } = reading;
  const flops = saved(usage.flops, usage.flops_full_depth);
  const memory = saved(usage.kv_bytes, usage.kv_bytes_full_depth);
  if (other) {
    const points = (mine, theirs) => `${sign(100 * (mine - theirs), 0)} points vs. A`;
    return [
      ["FLOPs saved", percent(flops), points(flops, saved(other.usage.flops, other.usage.flops_full_depth))],
      ["K/V saved", percent(memory), points(memory, saved(other.usage.kv_bytes, other.usage.kv_bytes_full_depth))],
    ];
  }
  return [
    [
      "FLOPs saved",
      percent(flops),
      `than ${deepest}× for all; ${figure(usage.flops / usage.flops_vanilla, 1)}× a plain model`,
      `${scaled([usage.flops, usage.flops_full_depth], "FLOP")} at ${deepest} reads of every token; a plain model reads each once`,
    ],
    ["K/V saved", percent(memory), scaled([usage.kv_bytes, usage.kv_bytes_full_depth], "B", 1024), KEPT],
  ];
}

/** Draws the summary of a reading; with `other`, as its difference from that one. */
export function summarise(element, reading, deepest, other = null) {
  if (!reading) {
    put(element, h("p", { class: "quiet" }, "Numbers appear with the first token."));
    return;
  }
  const gap = other ? `${sign(reading.mean_depth - other.mean_depth)} vs. A` : `of at most ${deepest}`;
  let loss = "nats per token";
  if (other) loss = `${sign(reading.loss - other.loss, 3)} vs. A`;
  else if (reading.full_loss !== null && reading.full_loss !== undefined) loss = `${figure(reading.full_loss, 3)} at full depth`;
  const { answers } = reading;
  if (answers && !other) loss = `${answers.right} of ${answers.count} answers right`;
  put(
    element,
    h("ol", { class: "histogram", "aria-label": "Tokens by depth" }, bars(reading.tokens, deepest)),
    h(
      "dl",
      { class: "stats" },
      stat("Mean depth", figure(reading.mean_depth), gap),
      stat("Loss", figure(answers && !other ? answers.loss : reading.loss, 3), loss, answers ? ANSWERS : LOSS),
      ...(reading.unknown_tokens ? [stat("Unknown", String(reading.unknown_tokens), "tokens", UNKNOWN)] : []),
      ...costs(reading, other, deepest).map((entry) => stat(...entry)),
    ),
  );
}

/** The summary as one sentence, for screen readers. */
export function sentence(reading, deepest) {
  const counts = histogram(reading.tokens, deepest).map((count, index) => `${count} at depth ${index + 1}`);
  return `${reading.tokens.length} tokens, mean depth ${figure(reading.mean_depth)}: ${counts.join(", ")}.`;
}
