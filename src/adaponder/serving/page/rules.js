// What decides depth. A rule is one line, `word:value` as the server's policies are, or `budget:value`; a dial turns it.

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** A dial position in 0 … 1 and back; position 1 is always the deepest. */
const linear = (low, high) => ({
  value: (place) => low + place * (high - low),
  place: (value) => clamp((value - low) / (high - low), 0, 1),
});
const logarithmic = (low, high) => ({
  value: (place) => low * (high / low) ** place,
  place: (value) => clamp(Math.log(value / low) / Math.log(high / low), 0, 1),
});

const digits = (value) => Number(value.toPrecision(3));

const THRESHOLD = "After each read the rule computes a number for each token. Once the number crosses this threshold, the token is not read again.";

const KNOWN = {
  gate: {
    name: "Learned gate",
    says: (value) => `a token is read again while its gate is at least ${value}`,
    symbol: "τ",
    meaning: "After each read a small network, the gate, gives each token a number between 0 and 1. Below this threshold the token halts: it is not read again.",
    scale: () => logarithmic(0.999, 1e-5),
    round: digits,
    start: (model) => model.tau ?? 0.5,
  },
  exit: {
    name: "Exit probability",
    says: (value) => `a token exits once its exit probability adds up to ${value}`,
    symbol: "q",
    meaning: THRESHOLD,
    scale: () => linear(0.01, 1),
    round: digits,
    start: () => 0.5,
  },
  alike: { name: "All alike", says: () => "this model reads every token equally often" },
  router: { name: "Router", says: () => "a token is read again while its router selects it" },
  fixed: {
    name: "Fixed depth",
    says: (value) => `every token is read ${value} ${value === 1 ? "time" : "times"}`,
    symbol: "depth",
    scale: (model) => linear(1, Math.max(2, model.iterations)),
    round: (value, model) => clamp(Math.round(value), 1, model.iterations),
    steps: (model) => model.iterations - 1,
    start: (model) => Math.max(1, Math.round(model.iterations / 2)),
  },
  entropy: {
    name: "Entropy",
    says: (value) => `a token is read again while the prediction's entropy is at least ${value} nats`,
    symbol: "H",
    meaning: THRESHOLD,
    scale: (model) => linear(Math.log(model.vocabulary ?? 50000), 0),
    round: digits,
    start: () => 2,
  },
  kl: {
    name: "Divergence",
    says: (value) => `a token is read again while the last read moved its prediction by ${value} nats or more`,
    symbol: "KL",
    meaning: THRESHOLD,
    scale: () => logarithmic(10, 1e-4),
    round: digits,
    start: () => 0.05,
  },
  change: {
    name: "Change of state",
    says: (value) => `a token is read again while the last read moved its state by ${value} of its length or more`,
    symbol: "Δ",
    meaning: THRESHOLD,
    scale: () => logarithmic(2, 1e-3),
    round: digits,
    start: () => 0.2,
  },
  random: {
    name: "Random",
    says: (value) => `a token is read again with probability ${value}`,
    symbol: "p",
    scale: () => linear(0, 1),
    round: digits,
    start: () => 0.5,
  },
  budget: {
    name: "Budget",
    says: (value) => `thresholds calibrated for a mean depth of ${value}`,
    symbol: "mean depth",
    meaning: "Thresholds of the gates that gave this mean depth on other text. On this text it may differ.",
    scale: (model) => linear(1, model.iterations),
    round: (value) => Math.round(value * 20) / 20,
    start: (model) => calibrated(model).sort((one, other) => one.budget - other.budget)[0].budget,
  },
};

/** Profiles between which the server interpolates: thresholds of the learned gate for a mean depth. */
function calibrated(model) {
  return model.profiles.filter(({ budget, policy }) => Number.isFinite(budget) && policy?.startsWith("gate:"));
}

/** The words of the rules that this model can run, in the order they are offered in. */
export function offered(model) {
  const words = Object.keys(KNOWN).filter((word) => word !== "budget" && model.policies.includes(word));
  // Of a model that halts no token the server takes no policy.
  if (!words.length) return ["alike"];
  return calibrated(model).length ? [words[0], "budget", ...words.slice(1)] : words;
}

/** The parts of a rule: its word, its number (`null` where it has none) and what is known of its word. */
export function parse(rule) {
  const [word, text] = [rule.split(":")[0], rule.slice(rule.indexOf(":") + 1)];
  const value = rule.includes(":") ? Number(text) : null;
  return { word, value, text: rule.includes(":") ? text : "", ...KNOWN[word] };
}

/** The rule with this word at its usual value. */
export function usual(word, model) {
  const known = KNOWN[word];
  return known.start ? `${word}:${known.start(model)}` : word;
}

/** Whether a rule, say from an address, is one that this model can run. */
export function runs(rule, model) {
  if (!rule || !offered(model).includes(rule.split(":")[0])) return false;
  const { scale, text } = parse(rule);
  return scale ? /^[\d.eE+-]+(,[\d.eE+-]+)*$/.test(text) : rule.indexOf(":") < 0;
}

/** Where the dial of a rule stands, 0 (shallow) to 1 (deep). */
export function place(rule, model) {
  const { scale, value } = parse(rule);
  return scale && Number.isFinite(value) ? scale(model).place(value) : 0.5;
}

/** The rule of the same word with the dial at a place. */
export function turned(rule, where, model) {
  const { word, scale, round } = parse(rule);
  return `${word}:${round(scale(model).value(where), model)}`;
}

/** A rule as the request's `adaponder` says it. */
export function asked(rule) {
  const { word, value } = parse(rule);
  if (word === "alike") return {};
  return word === "budget" ? { budget: value } : { policy: rule };
}

/** A rule in words. */
export function told(rule) {
  const { name, says, value, text } = parse(rule);
  return { name, sentence: says(Number.isFinite(value) ? value : text) };
}

/** The thresholds of a gate rule, one per gate; empty where another rule decides. */
export function thresholds(line, gates) {
  if (!line?.startsWith("gate:")) return [];
  const values = line.slice(5).split(",").map(Number);
  return Array.from({ length: gates }, (_, gate) => values[Math.min(gate, values.length - 1)]);
}
