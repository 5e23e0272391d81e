// The rules that decide depth. A rule is a string: a policy as the server takes it, `word:value`, or `budget:value`.

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** Scales map a slider's position (0 shallow, 1 deep) to the rule's value and back. */
const linear = (low, high) => ({
  value: (position) => low + position * (high - low),
  position: (value) => clamp((value - low) / (high - low), 0, 1),
});
const logarithmic = (low, high) => ({
  value: (position) => low * (high / low) ** position,
  position: (value) => clamp(Math.log(value / low) / Math.log(high / low), 0, 1),
});

const threeDigits = (value) => Number(value.toPrecision(3));

const THRESHOLD = "After each read the rule computes a number for each token. Once the number crosses this threshold, the token is not read again.";

const RULES = {
  gate: {
    name: "Learned gate",
    sentence: (value) => `a token is read again while its gate is at least ${value}`,
    symbol: "τ",
    meaning: "After each read a small network, the gate, gives each token a number between 0 and 1. Below this threshold the token halts: it is not read again.",
    scale: () => logarithmic(0.999, 1e-5),
    round: threeDigits,
    initial: (model) => model.tau ?? 0.5,
  },
  exit: {
    name: "Exit probability",
    sentence: (value) => `a token halts once its cumulative exit probability reaches ${value}`,
    symbol: "q",
    meaning: THRESHOLD,
    scale: () => linear(0.01, 1),
    round: threeDigits,
    initial: () => 0.5,
  },
  none: { name: "No halting", sentence: () => "this model reads every token equally often" },
  router: { name: "Router", sentence: () => "a token is read again while its router selects it" },
  fixed: {
    name: "Fixed depth",
    sentence: (value) => `every token is read ${value} ${value === 1 ? "time" : "times"}`,
    symbol: "depth",
    scale: (model) => linear(1, Math.max(2, model.iterations)),
    round: (value, model) => clamp(Math.round(value), 1, model.iterations),
    steps: (model) => model.iterations - 1,
    initial: (model) => Math.max(1, Math.round(model.iterations / 2)),
  },
  entropy: {
    name: "Entropy",
    sentence: (value) => `a token is read again while the prediction's entropy is at least ${value} nats`,
    symbol: "H",
    meaning: THRESHOLD,
    scale: (model) => linear(Math.log(model.vocabulary ?? 50000), 0),
    round: threeDigits,
    initial: () => 2,
  },
  kl: {
    name: "Divergence",
    sentence: (value) => `a token is read again while the last read changed its prediction by at least ${value} nats (KL divergence)`,
    symbol: "KL",
    meaning: THRESHOLD,
    scale: () => logarithmic(10, 1e-4),
    round: threeDigits,
    initial: () => 0.05,
  },
  change: {
    name: "Change of state",
    sentence: (value) => `a token is read again while the last read changed its hidden state by at least ${value} times its norm`,
    symbol: "Δ",
    meaning: THRESHOLD,
    scale: () => logarithmic(2, 1e-3),
    round: threeDigits,
    initial: () => 0.2,
  },
  random: {
    name: "Random",
    sentence: (value) => `a token is read again with probability ${value}`,
    symbol: "p",
    scale: () => linear(0, 1),
    round: threeDigits,
    initial: () => 0.5,
  },
  budget: {
    name: "Budget",
    sentence: (value) => `the gate has thresholds calibrated for a mean depth of ${value}`,
    symbol: "mean depth",
    meaning: "The learned gate, with thresholds that gave this mean depth on the calibration text. On this text it may differ.",
    scale: (model) => linear(1, model.iterations),
    round: (value) => Math.round(value * 20) / 20,
    initial: (model) => calibrated(model).sort((a, b) => a.budget - b.budget)[0].budget,
  },
};

/** Returns the learned gate's profiles; for other mean depths, the server interpolates between the thresholds of two of them. */
function calibrated(model) {
  return model.profiles.filter(({ budget, policy }) => Number.isFinite(budget) && policy?.startsWith("gate:"));
}

/** Returns the words (keys of `RULES`) of the rules that this model can run, in the order of the menu. */
export function offeredRules(model) {
  const words = Object.keys(RULES).filter((word) => word !== "budget" && model.policies.includes(word));
  // The server takes no policy for a model that never halts.
  if (!words.length) return ["none"];
  return calibrated(model).length ? [words[0], "budget", ...words.slice(1)] : words;
}

/** Returns a rule's `word`, its `value` (`null` if it has none, `NaN` for a list) also as `text`, and its entry in `RULES`. */
export function parseRule(rule) {
  const [word, text] = [rule.split(":")[0], rule.slice(rule.indexOf(":") + 1)];
  const value = rule.includes(":") ? Number(text) : null;
  return { word, value, text: rule.includes(":") ? text : "", ...RULES[word] };
}

/** Returns the rule with this word at its default value. */
export function defaultRule(word, model) {
  const { initial } = RULES[word];
  return initial ? `${word}:${initial(model)}` : word;
}

/** Returns whether this model can run a rule, which may come from a link. */
export function isRunnable(rule, model) {
  if (!rule || !offeredRules(model).includes(rule.split(":")[0])) return false;
  const { scale, text } = parseRule(rule);
  return scale ? /^[\d.eE+-]+(,[\d.eE+-]+)*$/.test(text) : rule.indexOf(":") < 0;
}

/** Returns the slider's position for a rule, 0 (shallow) to 1 (deep). */
export function positionOf(rule, model) {
  const { scale, value } = parseRule(rule);
  return scale && Number.isFinite(value) ? scale(model).position(value) : 0.5;
}

/** Returns the rule of the same word at a slider position. */
export function ruleAt(rule, position, model) {
  const { word, scale, round } = parseRule(rule);
  return `${word}:${round(scale(model).value(position), model)}`;
}

/** Returns a rule as fields of a request's `adaponder`. */
export function requestFields(rule) {
  const { word, value } = parseRule(rule);
  if (word === "none") return {};
  return word === "budget" ? { budget: value } : { policy: rule };
}

/** Returns a rule's name and a sentence that explains it. */
export function describe(rule) {
  const { name, sentence, value, text } = parseRule(rule);
  return { name, sentence: sentence(Number.isFinite(value) ? value : text) };
}

/** Returns the thresholds of a gate rule, one per gate; empty for other rules. */
export function thresholds(rule, gates) {
  if (!rule?.startsWith("gate:")) return [];
  const values = rule.slice(5).split(",").map(Number);
  return Array.from({ length: gates }, (_, gate) => values[Math.min(gate, values.length - 1)]);
}
