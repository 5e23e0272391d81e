// Numbers of a reading: how many tokens have which depth (the legend is the histogram), mean depth, loss, what is saved.

import { h, put } from "./dom.js";
import { wear } from "./palette.js";
import { figure, percent, scaled } from "./spelling.js";
import { explained } from "./tips.js";

/** Numbers of tokens of depth 1 … deepest. */
export function histogram(tokens, deepest) {
  const counts = new Array(deepest).fill(0);
  for (const token of tokens) if (token.depth) counts[token.depth - 1] += 1;
  return counts;
}

/** Explains why no token has this depth although others were read more often. */
function skipped(depth, policy) {
  const why = policy?.startsWith("gate:") ? "every token that was read this often had a gate at or above the threshold" : "by this rule every token was read again";
  return `No token stopped after ${depth} ${depth === 1 ? "read" : "reads"}: ${why}.`;
}

function bars({ tokens, policy }, deepest) {
  const counts = histogram(tokens, deepest);
  const most = Math.max(1, ...counts);
  return counts.map((count, index) => {
    const bar = h("span", { class: "bar", "--share": count / most });
    const swatch = h("span", { class: "swatch" }, `${index + 1}×`);
    wear(bar, index + 1, deepest);
    wear(swatch, index + 1, deepest);
    const label = `${count} of ${tokens.length} tokens are read ${index + 1} ${index ? "times" : "time"}`;
    const why = !count && counts.slice(index + 1).some(Boolean) ? explained(skipped(index + 1, policy)) : {};
    return h("li", { "aria-label": label, "data-count": count, ...why }, swatch, bar, h("span", { class: "count" }, String(count)));
  });
}

function stat(name, value, note, meaning) {
  return h(
    "div",
    { class: "stat", "data-stat": name },
    h("dt", {}, h("span", explained(meaning), name)),
    h("dd", {}, h("span", { class: "value" }, value), h("span", { class: "note" }, note)),
  );
}

const DEPTH = "How many times a token was read, on average.";
const UNKNOWN = "Words that the tokenizer does not know: the model reads one and the same token for all of them.";
const LOSS = "How badly the model predicts each token from those before it: the mean negative log-likelihood. Lower is better.";
const ANSWERS = "How badly the model predicts the answers: their mean negative log-likelihood. The rest of a puzzle is random and does not count.";
const KEPT = "A token that halts keeps the keys and values of its last read. Other tokens attend to them in later reads, without computing them again.";

const saved = (used, full) => (full ? 1 - used / full : 0);
const sign = (value, digits = 2) => {
  const rounded = Number(value.toFixed(digits));
  return `${rounded > 0 ? "+" : rounded < 0 ? "−" : "±"}${figure(Math.abs(rounded), digits)}`;
};

function costs(reading, other, deepest) {
  const { usage } = reading;
  const flops = saved(usage.flops, usage.flops_full_depth);
  const memory = saved(usage.kv_bytes, usage.kv_bytes_full_depth);
  const spent = `${scaled([usage.flops, usage.flops_full_depth], "FLOP")} that ${deepest} reads of every token would cost. A plain model reads each token once.`;
  let notes = [`than ${deepest}× for all; ${figure(usage.flops / usage.flops_vanilla, 1)}× a plain model`, scaled([usage.kv_bytes, usage.kv_bytes_full_depth], "B", 1024)];
  if (other) {
    const points = (mine, theirs) => `${sign(100 * (mine - theirs), 0)} points vs. A`;
    notes = [
      points(flops, saved(other.usage.flops, other.usage.flops_full_depth)),
      points(memory, saved(other.usage.kv_bytes, other.usage.kv_bytes_full_depth)),
    ];
  }
  return [
    ["FLOPs saved", percent(flops), notes[0], spent],
    ["K/V saved", percent(memory), notes[1], KEPT],
  ];
}

/** Draws the summary of a reading; with `other`, as its difference from that one. */
export function summarise(element, reading, deepest, other = null) {
  if (!reading) {
    put(element, h("p", { class: "quiet" }, "Numbers appear with the first token."));
    return;
  }
  const gap = other ? `${sign(reading.mean_depth - other.mean_depth)} vs. A` : `of at most ${deepest}`;
  const { answers } = reading;
  const counted = (scored) => (scored.answers ?? scored).loss;
  let loss = "nats per token";
  if (other) loss = `${sign(counted(reading) - counted(other), 3)} vs. A`;
  else if (reading.full_loss !== null && reading.full_loss !== undefined) loss = `${figure(reading.full_loss, 3)} at full depth`;
  if (answers) loss = `${answers.right} of ${answers.count} answers right${other ? `; ${loss}` : ""}`;
  put(
    element,
    h("ol", { class: "histogram", "aria-label": "Tokens by depth" }, bars(reading, deepest)),
    h(
      "dl",
      { class: "stats" },
      stat("Mean depth", figure(reading.mean_depth), gap, DEPTH),
      stat("Loss", figure(counted(reading), 3), loss, answers ? ANSWERS : LOSS),
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
