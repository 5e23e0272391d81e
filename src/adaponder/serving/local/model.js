// A GPT-NeoX decoder with recurrent depth, as in `adaponder.methods`, in float32. The keys and values of the last few texts are
// cached, so that a text with the same beginning is computed only from where it differs.

import { Memory } from "./kernel.js";
import { parsePolicy } from "./policies.js";

const ROWS = 16; // tokens computed together
const MAX_TEXTS = 6; // texts whose keys and values are cached
const MIN_SHARED = 32; // tokens; a text with a shorter common prefix gets an entry of its own while there is room
const TOP = 5; // most probable tokens recorded per prediction

const roundUp = (count) => (count + 15) & ~15;
const sigmoid = (x) => 1 / (1 + Math.exp(-x));

/** The error function, by its series or continued fraction, with an error below 1e-12. */
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size < 2.5) {
    let [term, sum] = [size, size];
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n += 1) {
      term *= (-size * size) / n;
      sum += term / (2 * n + 1);
    }
    return Math.sign(x) * sum * (2 / Math.sqrt(Math.PI));
  }
  let fraction = size;
  for (let n = 40; n > 0; n -= 1) fraction = size + n / 2 / fraction;
  return Math.sign(x) * (1 - Math.exp(-size * size) / fraction / Math.sqrt(Math.PI));
}

// A table of GELU's values and derivatives at steps of 1/512; cubic interpolation between them is exact to 1e-12.
const [STEPS, REACH] = [512, 8];
const GELU = new Float64Array(4 * REACH * STEPS + 4);
for (let index = 0; index <= 2 * REACH * STEPS + 1; index += 1) {
  const x = index / STEPS - REACH;
  const cdf = 0.5 * (1 + erf(x / Math.SQRT2));
  GELU[2 * index] = x * cdf;
  GELU[2 * index + 1] = (cdf + x * Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI)) / STEPS;
}

function gelu(x) {
  if (x <= -REACH) return 0;
  if (x >= REACH) return x;
  const position = (x + REACH) * STEPS;
  const index = position | 0;
  const t = position - index;
  const low = GELU[2 * index];
  const slope = GELU[2 * index + 1];
  const rise = GELU[2 * index + 2] - low;
  const bend = GELU[2 * index + 3] + slope - 2 * rise;
  return ((bend * t + rise - slope - bend) * t + slope) * t + low;
}

/** A linear layer `[m, k]`; `width` is the stride of its output rows. */
class Linear {
  constructor(memory, weight, bias) {
    const [m, k] = weight.shape;
    Object.assign(this, { memory, m, k, width: roundUp(m), bias: bias?.data ?? null, weight: memory.pack(weight.data, m, k) });
  }

  /** Writes the layer's outputs for `n` input rows at `a`, which are `aRow` floats apart, to `out`. */
  apply(out, a, aRow, n) {
    const { memory, m, k, width, bias, weight } = this;
    memory.product(out, width, a, aRow, weight, 16, 16 * k, n, k, m);
    if (!bias) return;
    for (let row = 0; row < n; row += 1) {
      const start = out + row * width;
      for (let column = 0; column < m; column += 1) memory.floats[start + column] += bias[column];
    }
  }
}

/**
 * A cached text: its token ids, their scores, and the index `start` at which its keys and values begin in memory: for each
 * iteration and layer the keys (in panels of 16 positions), then the values (row by row), of `capacity` positions. `key`
 * names the policy; the first `cached` tokens of the current request were computed by earlier requests.
 */
class Text {
  constructor() {
    Object.assign(this, { key: null, ids: [], scores: [], cached: 0, capacity: 0, start: 0 });
  }
}

export class Model {
  /** `facts`: `local` of model.json; `weights(name)` returns `{data, shape}` or `null`. */
  constructor(facts, weights) {
    const { layers, hidden, heads, intermediate, vocabulary, positions } = facts.backbone;
    const memory = new Memory();
    Object.assign(this, { facts, memory, hidden, headSize: hidden / heads, texts: [], rotations: [], clock: 0 });
    const norm = (name) => [weights(`${name}.weight`).data, weights(`${name}.bias`).data];
    const linear = (name) => new Linear(memory, weights(`${name}.weight`), weights(`${name}.bias`));
    this.layers = Array.from({ length: layers }, (_, layer) => {
      const name = `backbone.gpt_neox.layers.${layer}`;
      return {
        attentionNorm: norm(`${name}.input_layernorm`),
        qkv: linear(`${name}.attention.query_key_value`),
        dense: linear(`${name}.attention.dense`),
        mlpNorm: norm(`${name}.post_attention_layernorm`),
        up: linear(`${name}.mlp.dense_h_to_4h`),
        down: linear(`${name}.mlp.dense_4h_to_h`),
      };
    });
    this.finalNorm = norm("backbone.gpt_neox.final_layer_norm");
    const table = weights("backbone.gpt_neox.embed_in.weight");
    this.table = memory.reserve(table.data.length + 16);
    memory.floats.set(table.data, this.table);
    this.head = new Linear(memory, weights("backbone.lm_head.weight") ?? table, null);
    this.gates = [];
    for (let gate = 0; weights(`method.gates.${gate}.out.weight`); gate += 1) {
      const [inner, out] = [weights(`method.gates.${gate}.inner.weight`), norm(`method.gates.${gate}.out`)];
      this.gates.push({ inner: inner && linear(`method.gates.${gate}.inner`), out });
    }
    if (weights("method.exit.weight")) this.gates.push({ inner: null, out: norm("method.exit") });
    // Buffers for ROWS rows, used again in every pass.
    const buffer = (width) => memory.reserve(ROWS * roundUp(width));
    this.buffers = {
      x: buffer(hidden),
      normed: buffer(hidden),
      qkv: buffer(3 * hidden),
      attended: buffer(hidden),
      head: buffer(this.headSize),
      out: buffer(hidden),
      up: buffer(Math.max(intermediate, this.gates[0]?.inner?.m ?? 0)),
      attention: buffer(positions),
      logits: buffer(vocabulary),
      expected: buffer(hidden),
    };
  }

  /** Returns where the keys and values of an iteration and layer of a text begin. */
  keysAndValues(text, iteration, layer) {
    const size = text.capacity * this.hidden;
    const keys = text.start + (iteration * this.layers.length + layer) * 2 * size;
    return [keys, keys + size];
  }

  /** Makes room for this many positions of a text, moving its keys and values. */
  extend(text, positions) {
    if (positions <= text.capacity) return;
    const { memory, hidden, facts } = this;
    const capacity = roundUp(Math.min(facts.backbone.positions, Math.max(64, 2 * text.capacity, positions)));
    const blocks = 2 * facts.iterations * this.layers.length;
    const [oldStart, oldSize] = [text.start, text.capacity * hidden];
    text.start = memory.reserve(blocks * capacity * hidden + 16);
    for (let block = 0; oldSize && block < blocks; block += 1) {
      const source = oldStart + block * oldSize;
      memory.floats.copyWithin(text.start + block * capacity * hidden, source, source + oldSize);
    }
    text.capacity = capacity;
  }

  /** Returns the cached text with the longest common prefix with `ids` under `key`, cut to that prefix; else an empty one. */
  textFor(key, ids, forced) {
    const shared = (text) => {
      let same = 0;
      while (same < ids.length && text.ids[same] === ids[same] && text.scores[same].forced === (forced[same] ?? 0)) same += 1;
      return same;
    };
    let [best, common] = [null, 0];
    for (const text of this.texts) {
      const length = text.key === key ? shared(text) : -1;
      if (length >= 0 && (!best || length > common)) [best, common] = [text, length];
    }
    if (best && common < MIN_SHARED && common < best.ids.length && this.texts.length < MAX_TEXTS) best = null;
    if (!best && this.texts.length < MAX_TEXTS) {
      best = new Text();
      this.texts.push(best);
    }
    // Replaces the least recently used text.
    best ??= this.texts.reduce((oldest, text) => (text.time < oldest.time ? text : oldest));
    if (best.key !== key) common = 0;
    Object.assign(best, { key, cached: common, time: (this.clock += 1) });
    best.ids.length = best.scores.length = common;
    return best;
  }

  /** Normalises `rows` rows at `x` into `out` (layer normalisation). */
  norm(out, x, rows, [weight, bias]) {
    const { hidden: d, memory: { floats }, facts } = this;
    for (let row = 0; row < rows; row += 1) {
      const [from, to] = [x + row * d, out + row * d];
      let [mean, variance] = [0, 0];
      for (let at = 0; at < d; at += 1) mean += floats[from + at];
      mean /= d;
      for (let at = 0; at < d; at += 1) variance += (floats[from + at] - mean) ** 2;
      const scale = 1 / Math.sqrt(variance / d + facts.backbone.epsilon);
      for (let at = 0; at < d; at += 1) floats[to + at] = (floats[from + at] - mean) * scale * weight[at] + bias[at];
    }
  }

  /** Returns cosines and sines of a position's rotary angles, which are rounded to float32 as in the package. */
  rotation(position) {
    const { frequencies } = this.facts.backbone;
    const angles = () => frequencies.map((frequency) => Math.fround(Math.fround(frequency) * position));
    return (this.rotations[position] ??= [Math.cos, Math.sin].map((wave) => Float32Array.from(angles(), wave)));
  }

  /** Rotates queries and keys, caches keys and values, and scales queries. */
  cacheKeysAndValues(text, iteration, layer, rows) {
    const { hidden: d, headSize: size, memory: { floats }, facts: { backbone } } = this;
    const [keys, values] = this.keysAndValues(text, iteration, layer);
    const half = backbone.frequencies.length;
    const width = this.layers[0].qkv.width;
    rows.forEach(({ position }, row) => {
      const panel = keys + (position >> 4) * 16 * d + (position & 15);
      const [cos, sin] = this.rotation(position);
      for (let head = 0; head < backbone.heads; head += 1) {
        const query = this.buffers.qkv + row * width + head * 3 * size;
        for (const start of [query, query + size]) {
          for (let at = 0; at < half; at += 1) {
            const [low, high] = [floats[start + at], floats[start + half + at]];
            floats[start + at] = low * cos[at] - high * sin[at];
            floats[start + half + at] = high * cos[at] + low * sin[at];
          }
        }
        for (let at = 0; at < size; at += 1) {
          floats[query + at] /= Math.sqrt(size);
          floats[panel + 16 * (head * size + at)] = floats[query + size + at];
          floats[values + position * d + head * size + at] = floats[query + 2 * size + at];
        }
      }
    });
  }

  /** Computes the causal attention of rows into `buffers.attended`. */
  attend(text, iteration, layer, rows) {
    const { hidden: d, headSize: size, memory, buffers } = this;
    const { floats } = memory;
    const [keys, values] = this.keysAndValues(text, iteration, layer);
    const { width } = this.layers[0].qkv;
    const length = rows.at(-1).position + 1;
    const stride = roundUp(length);
    for (let head = 0; head < d / size; head += 1) {
      memory.product(buffers.attention, stride, buffers.qkv + head * 3 * size, width, keys + 16 * head * size, 16, 16 * d, rows.length, size, length);
      rows.forEach(({ position }, row) => {
        const start = buffers.attention + row * stride;
        let [highest, total] = [-Infinity, 0];
        for (let at = start; at <= start + position; at += 1) if (floats[at] > highest) highest = floats[at];
        for (let at = start; at <= start + position; at += 1) total += floats[at] = Math.exp(floats[at] - highest);
        for (let at = start; at <= start + position; at += 1) floats[at] /= total;
        floats.fill(0, start + position + 1, start + length);
      });
      memory.product(buffers.head, roundUp(size), buffers.attention, stride, values + head * size, d, 16, rows.length, length, size);
      for (let row = 0; row < rows.length; row += 1) {
        const from = buffers.head + row * roundUp(size);
        floats.copyWithin(buffers.attended + row * d + head * size, from, from + size);
      }
    }
  }

  /** Runs the layers on rows `{position, input}`; sets their residual `stream` and final-normed `hidden` state. */
  pass(text, iteration, rows) {
    const { hidden: d, memory, buffers, facts: { backbone } } = this;
    const { floats } = memory;
    const n = rows.length;
    const addOutput = ({ width }) => {
      for (let row = 0; row < n; row += 1) for (let at = 0; at < d; at += 1) floats[buffers.x + row * d + at] += floats[buffers.out + row * width + at];
    };
    rows.forEach((row, index) => floats.set(row.input, buffers.x + index * d));
    this.layers.forEach((layer, index) => {
      this.norm(buffers.normed, buffers.x, n, layer.attentionNorm);
      layer.qkv.apply(buffers.qkv, buffers.normed, d, n);
      this.cacheKeysAndValues(text, iteration, index, rows);
      this.attend(text, iteration, index, rows);
      layer.dense.apply(buffers.out, buffers.attended, d, n);
      // With parallel residuals, attention and MLP both read the layer's input.
      if (backbone.parallel) this.norm(buffers.normed, buffers.x, n, layer.mlpNorm);
      addOutput(layer.dense);
      if (!backbone.parallel) this.norm(buffers.normed, buffers.x, n, layer.mlpNorm);
      layer.up.apply(buffers.up, buffers.normed, d, n);
      for (let at = buffers.up; at < buffers.up + n * layer.up.width; at += 1) floats[at] = gelu(floats[at]);
      layer.down.apply(buffers.out, buffers.up, layer.up.width, n);
      addOutput(layer.down);
    });
    this.norm(buffers.normed, buffers.x, n, this.finalNorm);
    rows.forEach((row, index) => {
      row.stream = floats.slice(buffers.x + index * d, buffers.x + (index + 1) * d);
      [row.previous, row.hidden] = [row.hidden, floats.slice(buffers.normed + index * d, buffers.normed + (index + 1) * d)];
    });
  }

  /** Computes the next-token logits of rows into `buffers.logits`; returns a function from a row's index to its logits. */
  logits(rows) {
    const { hidden: d, memory, buffers, head } = this;
    rows.forEach(({ hidden }, row) => memory.floats.set(hidden, buffers.normed + row * d));
    head.apply(buffers.logits, buffers.normed, d, rows.length);
    return (row) => memory.floats.subarray(buffers.logits + row * head.width, buffers.logits + row * head.width + head.m);
  }

  /** Returns the gate logits after an iteration of the rows whose hidden states are in `buffers.normed`. */
  gate(iteration, n) {
    const { hidden: d, memory: { floats }, buffers } = this;
    const { inner, out: [weight, [bias]] } = this.gates[Math.min(iteration, this.gates.length - 1)];
    if (inner) inner.apply(buffers.up, buffers.normed, d, n);
    const [start, width] = inner ? [buffers.up, inner.width] : [buffers.normed, d];
    return Array.from({ length: n }, (_, row) => {
      let sum = bias;
      for (let at = 0; at < weight.length; at += 1) {
        const value = floats[start + row * width + at];
        sum += weight[at] * (inner ? Math.fround(gelu(value)) : value);
      }
      return sum;
    });
  }

  /** Returns a function from a row's index to its expected embedding, for `n` rows of probabilities in `buffers.logits`. */
  expected(n) {
    const { hidden: d, memory, buffers, head, facts } = this;
    memory.product(buffers.expected, roundUp(d), buffers.logits, head.width, this.table, d, 16, n, head.m, d);
    return (row) => memory.floats.subarray(buffers.expected + row * roundUp(d), buffers.expected + row * roundUp(d) + d).map((x) => x * facts.table_scale);
  }

  /**
   * Computes the tokens of `ids` that the text lacks, in chunks; yields after each. Each token gets a score: its depth, gates,
   * and after each iteration its hidden state, the log of the softmax's normaliser and the most probable next tokens.
   */
  *run(text, ids, policy, { forced = {}, seed = 0 } = {}) {
    const { facts, hidden: d, memory, table } = this;
    while (text.ids.length < ids.length) {
      const start = text.ids.length;
      const end = Math.min(ids.length, start + ROWS);
      this.extend(text, end);
      let rows = [];
      for (let position = start; position < end; position += 1) {
        const from = table + ids[position] * d;
        const input = memory.floats.slice(from, from + d).map((x) => x * facts.input_scale);
        const score = { depth: 0, forced: forced[position] ?? 0, gates: [], hidden: [], normaliser: [], top: [] };
        text.scores[position] = score;
        rows.push({ position, input, embedding: input, stayProbability: 1, score });
      }
      for (let iteration = 0; rows.length; iteration += 1) {
        this.pass(text, iteration, rows);
        const logits = this.logits(rows);
        rows.forEach(({ score, hidden }, row) => {
          score.depth += 1;
          score.hidden.push(hidden);
          record(score, logits(row));
        });
        if (iteration + 1 === facts.iterations) break;
        rows = this.advance(text, iteration, rows, logits, policy, seed);
      }
      for (let position = start; position < end; position += 1) text.ids.push(ids[position]);
      yield;
    }
  }

  /** Halts rows as the policy decides; returns the others with their next input, computed as in the method's `advance`. */
  advance(text, iteration, rows, logits, policy, seed) {
    const { update, halts, exits, mixes, state_scale: scale } = this.facts;
    const gates = halts ? this.gate(iteration, rows.length) : [];
    const active = [];
    rows.forEach((row, index) => {
      if (halts) {
        if (exits) row.stayProbability *= sigmoid(-gates[index]);
        row.gate = Math.fround(exits ? row.stayProbability : sigmoid(gates[index]));
        row.score.gates.push(row.gate);
      }
      const { forced } = row.score;
      const decision = { iteration, seed, logits: logits(index), ...row };
      const continues = !halts || (forced ? iteration + 1 < forced : policy.continues(decision));
      if (policy.keepsLogits) row.previousLogits = logits(index).slice();
      if (!continues) this.freeze(text, iteration, row.position);
      else {
        // Active rows come first, as `expected` needs them.
        if (mixes) softmax(logits(index), logits(active.length));
        active.push(row);
      }
    });
    const expected = mixes && active.length ? this.expected(active.length) : null;
    active.forEach((row, index) => {
      if (update === "stream") row.input = row.stream;
      else if (update === "state") row.input = row.hidden;
      else if (update === "reread") row.input = row.embedding.map((x, at) => x + scale * row.hidden[at]);
      else {
        const weight = update === "gated" ? row.gate : 1;
        const embedding = expected(index);
        row.input = row.input.map((x, at) => x + weight * embedding[at]);
      }
    });
    return active;
  }

  /** Copies a halted token's keys and values to all later iterations. */
  freeze(text, iteration, position) {
    const { hidden: d, memory: { floats } } = this;
    for (let layer = 0; layer < this.layers.length; layer += 1) {
      const panel = (position >> 4) * 16 * d + (position & 15);
      const [keys, values] = this.keysAndValues(text, iteration, layer);
      for (let later = iteration + 1; later < this.facts.iterations; later += 1) {
        const [toKeys, toValues] = this.keysAndValues(text, later, layer);
        for (let at = 0; at < d; at += 1) floats[toKeys + panel + 16 * at] = floats[keys + panel + 16 * at];
        floats.copyWithin(toValues + position * d, values + position * d, values + (position + 1) * d);
      }
    }
  }

  /** Returns the loss in nats of next token `id` after each iteration of a score. */
  losses(score, id) {
    const { hidden: d, head, memory: { floats } } = this;
    const panel = head.weight + (id >> 4) * 16 * d + (id & 15);
    return score.hidden.map((state, iteration) => {
      let logit = 0;
      for (let at = 0; at < d; at += 1) logit += state[at] * floats[panel + 16 * at];
      return score.normaliser[iteration] - logit;
    });
  }

  /** Parses a policy such as `gate:0.1`; the default is the method's. */
  policy(line) {
    return parsePolicy(line ?? this.facts.default_policy);
  }
}

/** Appends a prediction to a score: the log of its normaliser, and its most probable tokens. */
function record(score, logits) {
  let [highest, total] = [-Infinity, 0];
  const top = []; // ids, the most probable first; of equal ones the lower id
  for (let id = 0; id < logits.length; id += 1) {
    const logit = logits[id];
    if (logit > highest) highest = logit;
    if (top.length === TOP && !(logit > logits[top[TOP - 1]])) continue;
    let rank = Math.min(top.length, TOP - 1);
    while (rank > 0 && logit > logits[top[rank - 1]]) {
      top[rank] = top[rank - 1];
      rank -= 1;
    }
    top[rank] = id;
  }
  for (let id = 0; id < logits.length; id += 1) total += Math.exp(logits[id] - highest);
  const normaliser = highest + Math.log(total);
  score.normaliser.push(normaliser);
  score.top.push(top.map((id) => ({ id, logprob: logits[id] - normaliser })));
}

/** Writes the softmax of logits to `out`, which may be the same array. */
function softmax(logits, out) {
  let [highest, total] = [-Infinity, 0];
  for (const logit of logits) if (logit > highest) highest = logit;
  for (let id = 0; id < logits.length; id += 1) total += out[id] = Math.exp(logits[id] - highest);
  for (let id = 0; id < out.length; id += 1) out[id] /= total;
}
