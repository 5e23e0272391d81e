// The policies that decide after an iteration whether a token halts, as in `adaponder.policies`, and the sampler.

const MASK = (1n << 64n) - 1n;
const GOLDEN = 0x9e3779b97f4a7c15n; // splitmix64's increment

function logProbabilities(logits) {
  const highest = logits.reduce((a, b) => Math.max(a, b));
  const normaliser = highest + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0));
  return Float64Array.from(logits, (logit) => logit - normaliser);
}

/** Returns the mean of `value(log, id)` under probabilities with these logarithms. */
const expectation = (logs, value) => logs.reduce((sum, log, id) => sum + (log > -700 ? Math.exp(log) * value(log, id) : 0), 0);
const norm = (state) => Math.sqrt(state.reduce((sum, x) => sum + x * x, 0));

// Numbers that a threshold is compared with; entropies and divergences are in nats.
const MEASURES = {
  entropy: ({ logits }) => -expectation(logProbabilities(logits), (log) => log),
  kl({ logits, previousLogits }) {
    if (!previousLogits) return Infinity;
    const earlier = logProbabilities(previousLogits);
    return expectation(logProbabilities(logits), (log, id) => log - earlier[id]);
  },
  change: ({ hidden, previous }) => (previous ? norm(hidden.map((x, index) => x - previous[index])) / norm(previous) : Infinity),
};

/** Returns a uniform number in [0, 1) from position, seed and iteration, as the package's random policy does. */
function uniform(position, seed, iteration) {
  let x = BigInt(position) + ((BigInt(seed) * 0x9e3779b9n + BigInt(iteration) * 0x85ebca6bn) & ((1n << 62n) - 1n));
  for (const factor of [0xbf58476d1ce4e5b9n, 0x94d049bb133111ebn]) {
    x &= MASK;
    x = ((x ^ (x >> 30n)) * factor) & MASK;
  }
  x ^= x >> 31n;
  return Number(x & 0xffffffn) / (1 << 24);
}

/**
 * Parses a policy such as `gate:0.1`. `continues(row)` returns whether the row's token gets another iteration;
 * `heads(iteration)` returns how often the policy evaluates the language-model head per token to decide after that iteration.
 */
export function parsePolicy(line) {
  const word = line.split(":")[0];
  const values = line.slice(word.length + 1).split(",").map(Number);
  const threshold = (iteration) => (values.length > 1 ? values[iteration] : values[0]);
  const policy = { continues: null, keepsLogits: word === "kl", seeded: word === "random" };
  policy.heads = (iteration) => (word === "entropy" ? 1 : word === "kl" && iteration ? 2 : 0);
  if (word === "fixed") policy.continues = ({ iteration }) => iteration + 1 < values[0];
  if (word === "gate") policy.continues = ({ gate, iteration }) => gate >= Math.fround(threshold(iteration));
  if (word === "exit") policy.continues = ({ gate }) => gate > Math.fround(1 - values[0]);
  if (word === "random") policy.continues = ({ position, seed, iteration }) => uniform(position, seed, iteration) < values[0];
  if (MEASURES[word]) policy.continues = (row) => Math.fround(MEASURES[word](row)) >= Math.fround(threshold(row.iteration));
  if (!policy.continues || values.some(Number.isNaN)) throw new Error(`This page cannot run the rule ${line}.`);
  return policy;
}

/** The output function of splitmix64. */
function splitmix(x) {
  for (const [shift, factor] of [[30n, 0xbf58476d1ce4e5b9n], [27n, 0x94d049bb133111ebn], [31n, 1n]]) {
    x = BigInt.asUintN(64, (x ^ (x >> shift)) * factor);
  }
  return x;
}

/** Samples the next token by Gumbel noise, the same as the package's for this seed and position. */
export function sample(logits, { temperature, seed, position }) {
  const key = splitmix((splitmix(BigInt(seed)) + GOLDEN) & MASK) + (BigInt(position) << 32n) * GOLDEN;
  let [token, highest] = [0, -Infinity];
  for (let id = 0; id < logits.length; id += 1) {
    let value = logits[id];
    if (temperature > 0) {
      // The noise is at most 37: a token that lacks more than that cannot win.
      if (value / temperature + 37 <= highest) continue;
      const u = (Number(splitmix(BigInt.asUintN(64, key + BigInt(id) * GOLDEN)) >> 12n) + 0.5) * 2 ** -52;
      value = value / temperature - Math.log(-Math.log(u));
    }
    if (value > highest) [token, highest] = [id, value];
  }
  return token;
}
