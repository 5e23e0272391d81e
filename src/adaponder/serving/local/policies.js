// The rules that decide after an iteration whether a token is read again, as `adaponder.policies` defines them.

const [MASK, GOLDEN] = [(1n << 64n) - 1n, 0x9e3779b97f4a7c15n];

/** Entropy of logits, and their divergence from earlier ones, in nats. */
function logProbabilities(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  const normaliser = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
  return Float64Array.from(logits, (logit) => logit - normaliser);
}

const expectation = (logs, value) => logs.reduce((sum, log, id) => sum + (log > -700 ? Math.exp(log) * value(log, id) : 0), 0);
const length = (state) => Math.sqrt(state.reduce((sum, x) => sum + x * x, 0));

const MEASURES = {
  entropy: ({ logits }) => -expectation(logProbabilities(logits), (log) => log),
  kl({ logits, before }) {
    if (!before) return Infinity;
    const earlier = logProbabilities(before);
    return expectation(logProbabilities(logits), (log, id) => log - earlier[id]);
  },
  change: ({ hidden, previous }) => (previous ? length(hidden.map((x, at) => x - previous[at])) / length(previous) : Infinity),
};

/** A uniform number in [0, 1) from position, seed and iteration. */
function chance(position, seed, iteration) {
  let x = BigInt(position) + ((BigInt(seed) * 0x9e3779b9n + BigInt(iteration) * 0x85ebca6bn) & ((1n << 62n) - 1n));
  for (const factor of [0xbf58476d1ce4e5b9n, 0x94d049bb133111ebn]) {
    x &= MASK;
    x = ((x ^ (x >> 30n)) * factor) & MASK;
  }
  x ^= x >> 31n;
  return Number(x & 0xffffffn) / (1 << 24);
}

/**
 * The policy of a line: `goes(row)` says whether a row's token is read again, `line` names the policy with all that its
 * decisions depend on, `heads` how often it computes logits to decide after an iteration.
 */
export function deciding(line) {
  const word = line.split(":")[0];
  const values = line.slice(word.length + 1).split(",").map(Number);
  const at = (iteration) => (values.length > 1 ? values[iteration] : values[0]);
  const known = { line, goes: null, keepsLogits: word === "kl", seeded: word === "random" };
  known.heads = (iteration) => (word === "entropy" ? 1 : word === "kl" && iteration ? 2 : 0);
  if (word === "fixed") known.goes = ({ iteration }) => iteration + 1 < values[0];
  if (word === "gate") known.goes = ({ gate, iteration }) => gate >= Math.fround(at(iteration));
  if (word === "exit") known.goes = ({ gate }) => gate > Math.fround(1 - values[0]);
  if (word === "random") known.goes = ({ position, seed, iteration }) => chance(position, seed, iteration) < values[0];
  if (MEASURES[word]) known.goes = (row) => Math.fround(MEASURES[word](row)) >= Math.fround(at(row.iteration));
  if (!known.goes || values.some(Number.isNaN)) throw new Error(`${line} is no rule that this page can run.`);
  return known;
}

/** One of splitmix64's outputs. */
function mixed(x) {
  for (const [shift, factor] of [[30n, 0xbf58476d1ce4e5b9n], [27n, 0x94d049bb133111ebn], [31n, 1n]]) {
    x = BigInt.asUintN(64, (x ^ (x >> shift)) * factor);
  }
  return x;
}

/** The next token, drawn with the noise that the package draws for the same seed and position. */
export function draw(logits, { temperature, seed, position }) {
  const key = mixed(mixed(BigInt(seed)) + GOLDEN & MASK) + (BigInt(position) << 32n) * GOLDEN;
  let [token, most] = [0, -Infinity];
  for (let id = 0; id < logits.length; id += 1) {
    let value = logits[id];
    if (temperature > 0) {
      // Noise is at most 37.
      if (value / temperature + 37 <= most) continue;
      const uniform = (Number(mixed(BigInt.asUintN(64, key + BigInt(id) * GOLDEN)) >> 12n) + 0.5) * 2 ** -52;
      value = value / temperature - Math.log(-Math.log(uniform));
    }
    if (value > most) [token, most] = [id, value];
  }
  return token;
}
