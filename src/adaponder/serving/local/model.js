// A GPT-NeoX decoder that reads each token several times, as `adaponder.methods` defines it, in float32. Keys and values
// of every iteration are kept, so that a text which begins like an earlier one is computed from where it differs.

import { Memory } from "./kernel.js";
import { deciding } from "./policies.js";

const ROWS = 16; // tokens that pass through the layers together
const TEXTS = 6; // texts whose keys and values are kept
const WORTH_KEEPING = 32; // tokens; a text that shares fewer is put beside, not in place of, the earlier one
const TOP = 5; // likeliest tokens that are kept of each prediction

const wide = (count) => (count + 15) & ~15;
export const sigmoid = (x) => 1 / (1 + Math.exp(-x));

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

// GELU by table: exact values 1/512 apart and their derivative, between which a cubic is exact to 1e-12.
const [STEP, REACH] = [512, 8];
const GELU = new Float64Array(4 * REACH * STEP + 4);
for (let at = 0; at <= 2 * REACH * STEP + 1; at += 1) {
  const x = at / STEP - REACH;
  const below = 0.5 * (1 + erf(x / Math.SQRT2));
  GELU[2 * at] = x * below;
  GELU[2 * at + 1] = (below + x * Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI)) / STEP;
}

function gelu(x) {
  if (x <= -REACH) return 0;
  if (x >= REACH) return x;
  const place = (x + REACH) * STEP;
  const at = place | 0;
  const t = place - at;
  const low = GELU[2 * at];
  const slope = GELU[2 * at + 1];
  const rise = GELU[2 * at + 2] - low;
  const bend = GELU[2 * at + 3] + slope - 2 * rise;
  return ((bend * t + rise - slope - bend) * t + slope) * t + low;
}

/** A linear layer whose output rows lie `width` floats apart. */
class Linear {
  constructor(memory, weight, bias) {
    const [m, k] = weight.shape;
    Object.assign(this, { memory, m, k, width: wide(m), bias: bias?.data ?? null, at: memory.pack(weight.data, m, k) });
  }

  apply(out, a, aRow, n) {
    const { memory, m, k, width, bias } = this;
    memory.product(out, width, a, aRow, this.at, 16, 16 * k, n, k, m);
    if (!bias) return;
    for (let row = 0; row < n; row += 1) {
      for (let column = 0, to = out + row * width; column < m; column += 1) memory.floats[to + column] += bias[column];
    }
  }
}

/**
 * A text with its scores, keys and values: of each iteration and layer, keys in panels of 16 positions and values row by
 * row, from `used` on in memory with room for `room` positions. `kept` tokens were computed for an earlier text.
 */
class Text {
  constructor() {
    Object.assign(this, { key: null, ids: [], scores: [], kept: 0, room: 0, used: 0 });
  }
}

export class Model {
  /** `facts` as the command writes them, `weights` a function that gives `{data, shape}` of a name, or `null`. */
  constructor(facts, weights, options) {
    const { layers, hidden, heads, intermediate, vocabulary, positions } = facts.backbone;
    const memory = new Memory(options);
    Object.assign(this, { facts, memory, hidden, size: hidden / heads, texts: [], turns: [], clock: 0 });
    const norm = (name) => [weights(`${name}.weight`).data, weights(`${name}.bias`).data];
    const linear = (name) => new Linear(memory, weights(`${name}.weight`), weights(`${name}.bias`));
    this.layers = Array.from({ length: layers }, (_, layer) => {
      const name = `backbone.gpt_neox.layers.${layer}`;
      return {
        before: norm(`${name}.input_layernorm`),
        qkv: linear(`${name}.attention.query_key_value`),
        dense: linear(`${name}.attention.dense`),
        between: norm(`${name}.post_attention_layernorm`),
        up: linear(`${name}.mlp.dense_h_to_4h`),
        down: linear(`${name}.mlp.dense_4h_to_h`),
      };
    });
    this.last = norm("backbone.gpt_neox.final_layer_norm");
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
    const room = (width) => memory.reserve(ROWS * wide(width));
    this.room = { x: room(hidden), normed: room(hidden), qkv: room(3 * hidden), mixed: room(hidden), one: room(this.size) };
    Object.assign(this.room, { out: room(hidden), up: room(Math.max(intermediate, this.gates[0]?.inner?.m ?? 0)) });
    Object.assign(this.room, { attention: room(positions), logits: room(vocabulary), expected: room(hidden) });
  }

  /** Where keys (or values) of an iteration and layer of a text begin. */
  place(text, iteration, layer, values) {
    return text.used + ((iteration * this.layers.length + layer) * 2 + (values ? 1 : 0)) * text.room * this.hidden;
  }

  /** Makes room for so many positions of a text, keeping what it holds. */
  extend(text, positions) {
    if (positions <= text.room) return;
    const { memory, hidden, facts } = this;
    const room = wide(Math.min(facts.backbone.positions, Math.max(64, 2 * text.room, positions)));
    const blocks = 2 * facts.iterations * this.layers.length;
    const [from, had] = [text.used, text.room * hidden];
    text.used = memory.reserve(blocks * room * hidden + 16);
    for (let block = 0; had && block < blocks; block += 1) {
      const source = from + block * had;
      memory.floats.copyWithin(text.used + block * room * hidden, source, source + had);
    }
    text.room = room;
  }

  /** The kept text that shares the longest beginning with `ids` under the same rule, cut to what they share. */
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
    if (best && common < WORTH_KEEPING && common < best.ids.length && this.texts.length < TEXTS) best = null;
    if (!best && this.texts.length < TEXTS) {
      best = new Text();
      this.texts.push(best);
    }
    // In place of the text that was not used for longest.
    best ??= this.texts.reduce((oldest, text) => (text.time < oldest.time ? text : oldest));
    if (best.key !== key) common = 0;
    Object.assign(best, { key, kept: common, time: (this.clock += 1) });
    best.ids.length = best.scores.length = common;
    return best;
  }

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

  /** Cosines and sines of a position; its angles are rounded to float32, as in the package. */
  turn(position) {
    const { frequencies } = this.facts.backbone;
    const angles = () => frequencies.map((frequency) => Math.fround(Math.fround(frequency) * position));
    return (this.turns[position] ??= [Math.cos, Math.sin].map((wave) => Float32Array.from(angles(), wave)));
  }

  /** Rotates queries and keys, stores keys and values, and scales queries, for the rows' positions. */
  store(text, iteration, layer, rows) {
    const { hidden: d, size, memory: { floats }, facts: { backbone } } = this;
    const [keys, values] = [this.place(text, iteration, layer, false), this.place(text, iteration, layer, true)];
    const half = backbone.frequencies.length;
    const width = this.layers[0].qkv.width;
    rows.forEach(({ position }, row) => {
      const panel = keys + (position >> 4) * 16 * d + (position & 15);
      const [cos, sin] = this.turn(position);
      for (let head = 0; head < backbone.heads; head += 1) {
        const query = this.room.qkv + row * width + head * 3 * size;
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

  /** Mixes the values of all positions up to each row's own, into `room.mixed`. */
  attend(text, iteration, layer, rows) {
    const { hidden: d, size, memory, room } = this;
    const { floats } = memory;
    const [keys, values] = [this.place(text, iteration, layer, false), this.place(text, iteration, layer, true)];
    const { width } = this.layers[0].qkv;
    const seen = rows.at(-1).position + 1;
    const stride = wide(seen);
    for (let head = 0; head < d / size; head += 1) {
      memory.product(room.attention, stride, room.qkv + head * 3 * size, width, keys + 16 * head * size, 16, 16 * d, rows.length, size, seen);
      rows.forEach(({ position }, row) => {
        const start = room.attention + row * stride;
        let [most, total] = [-Infinity, 0];
        for (let at = start; at <= start + position; at += 1) if (floats[at] > most) most = floats[at];
        for (let at = start; at <= start + position; at += 1) total += floats[at] = Math.exp(floats[at] - most);
        for (let at = start; at <= start + position; at += 1) floats[at] /= total;
        floats.fill(0, start + position + 1, start + seen);
      });
      memory.product(room.one, wide(size), room.attention, stride, values + head * size, d, 16, rows.length, seen, size);
      for (let row = 0; row < rows.length; row += 1) {
        const from = room.one + row * wide(size);
        floats.copyWithin(room.mixed + row * d + head * size, from, from + size);
      }
    }
  }

  /** One pass over rows `{position, input}`: sets their `stream` and final-normed `hidden`. */
  pass(text, iteration, rows) {
    const { hidden: d, memory, room, facts: { backbone } } = this;
    const { floats } = memory;
    const n = rows.length;
    const addTo = (x, { width }) => {
      for (let row = 0; row < n; row += 1) for (let at = 0; at < d; at += 1) floats[x + row * d + at] += floats[room.out + row * width + at];
    };
    rows.forEach((row, index) => floats.set(row.input, room.x + index * d));
    this.layers.forEach((layer, index) => {
      this.norm(room.normed, room.x, n, layer.before);
      layer.qkv.apply(room.qkv, room.normed, d, n);
      this.store(text, iteration, index, rows);
      this.attend(text, iteration, index, rows);
      layer.dense.apply(room.out, room.mixed, d, n);
      // With parallel residuals, attention and MLP both read the layer's input.
      if (backbone.parallel) this.norm(room.normed, room.x, n, layer.between);
      addTo(room.x, layer.dense);
      if (!backbone.parallel) this.norm(room.normed, room.x, n, layer.between);
      layer.up.apply(room.up, room.normed, d, n);
      for (let at = room.up; at < room.up + n * layer.up.width; at += 1) floats[at] = gelu(floats[at]);
      layer.down.apply(room.out, room.up, layer.up.width, n);
      addTo(room.x, layer.down);
    });
    this.norm(room.normed, room.x, n, this.last);
    rows.forEach((row, index) => {
      row.stream = floats.slice(room.x + index * d, room.x + (index + 1) * d);
      [row.previous, row.hidden] = [row.hidden, floats.slice(room.normed + index * d, room.normed + (index + 1) * d)];
    });
  }

  /** Next-token logits of rows, into `room.logits`; the rows lie `head.width` apart. */
  logits(rows) {
    const { hidden: d, memory, room, head } = this;
    rows.forEach(({ hidden }, row) => memory.floats.set(hidden, room.normed + row * d));
    head.apply(room.logits, room.normed, d, rows.length);
    return (row) => memory.floats.subarray(room.logits + row * head.width, room.logits + row * head.width + head.m);
  }

  /** Logits that the gate after an iteration gives rows whose hidden states stand in `room.normed`. */
  gate(iteration, n) {
    const { hidden: d, memory: { floats }, room } = this;
    const { inner, out: [weight, [bias]] } = this.gates[Math.min(iteration, this.gates.length - 1)];
    if (inner) inner.apply(room.up, room.normed, d, n);
    const [start, width] = inner ? [room.up, inner.width] : [room.normed, d];
    return Array.from({ length: n }, (_, row) => {
      let sum = bias;
      for (let at = 0; at < weight.length; at += 1) {
        const value = floats[start + row * width + at];
        sum += weight[at] * (inner ? Math.fround(gelu(value)) : value);
      }
      return sum;
    });
  }

  /** `softmax(logits) @ table`, times its scale, of the first rows of `room.logits`, which hold probabilities. */
  expected(n) {
    const { hidden: d, memory, room, head, facts } = this;
    memory.product(room.expected, wide(d), room.logits, head.width, this.table, d, 16, n, head.m, d);
    return (row) => memory.floats.subarray(room.expected + row * wide(d), room.expected + row * wide(d) + d).map((x) => x * facts.table_scale);
  }

  /**
   * Reads `ids` from where the text ends, some tokens at a time; yields between them. Each token gets a score: its depth,
   * gates, and after each iteration its hidden state, the logarithm of the normaliser and the likeliest next tokens.
   */
  *read(text, ids, policy, { forced = {}, seed = 0 } = {}) {
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
        rows.push({ position, input, first: input, staying: 1, score });
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

  /** Halts rows, and gives the others the input of their next iteration: what `advance` of the method does. */
  advance(text, iteration, rows, logits, policy, seed) {
    const { update, halts, state_scale: scale } = this.facts;
    const { exits } = this.facts;
    const gates = halts ? this.gate(iteration, rows.length) : [];
    const going = [];
    rows.forEach((row, index) => {
      if (halts) {
        if (exits) row.staying *= sigmoid(-gates[index]);
        row.gate = Math.fround(exits ? row.staying : sigmoid(gates[index]));
        row.score.gates.push(row.gate);
      }
      const { forced } = row.score;
      const asked = { iteration, seed, logits: logits(index), ...row };
      const goes = !halts || (forced ? iteration + 1 < forced : policy.goes(asked));
      if (policy.keepsLogits) row.before = logits(index).slice();
      if (!goes) this.freeze(text, iteration, row.position);
      else {
        // Rows move up, so that those that go on are the first.
        if (this.facts.mixes) becomeProbabilities(logits(index), logits(going.length));
        going.push(row);
      }
    });
    const expected = this.facts.mixes && going.length ? this.expected(going.length) : null;
    going.forEach((row, index) => {
      if (update === "stream") row.input = row.stream;
      else if (update === "state") row.input = row.hidden;
      else if (update === "reread") row.input = row.first.map((x, at) => x + scale * row.hidden[at]);
      else {
        const weight = update === "gated" ? row.gate : 1;
        const mixture = expected(index);
        row.input = row.input.map((x, at) => x + weight * mixture[at]);
      }
    });
    return going;
  }

  /** A halted token keeps its keys and values in all later iterations. */
  freeze(text, iteration, position) {
    const { hidden: d, memory: { floats } } = this;
    for (let layer = 0; layer < this.layers.length; layer += 1) {
      const panel = (position >> 4) * 16 * d + (position & 15);
      const [keys, values] = [false, true].map((kind) => this.place(text, iteration, layer, kind));
      for (let later = iteration + 1; later < this.facts.iterations; later += 1) {
        const [toKeys, toValues] = [false, true].map((kind) => this.place(text, later, layer, kind));
        for (let at = 0; at < d; at += 1) floats[toKeys + panel + 16 * at] = floats[keys + panel + 16 * at];
        floats.copyWithin(toValues + position * d, values + position * d, values + (position + 1) * d);
      }
    }
  }

  /** The loss of a next token after each iteration of a score, in nats. */
  losses(score, id) {
    const { hidden: d, head, memory: { floats } } = this;
    const panel = head.at + (id >> 4) * 16 * d + (id & 15);
    return score.hidden.map((state, iteration) => {
      let logit = 0;
      for (let at = 0; at < d; at += 1) logit += state[at] * floats[panel + 16 * at];
      return score.normaliser[iteration] - logit;
    });
  }

  /** The policy of a line such as `gate:0.1`; without one, the method's own. */
  policy(line) {
    return deciding(line ?? this.facts.default_policy);
  }
}

/** Adds what a prediction says to a score: the logarithm of its normaliser, and its likeliest tokens. */
function record(score, logits) {
  let [most, total] = [-Infinity, 0];
  const top = []; // ids, the likeliest first; of equals, the lower id
  for (let id = 0; id < logits.length; id += 1) {
    const logit = logits[id];
    if (logit > most) most = logit;
    if (top.length === TOP && !(logit > logits[top[TOP - 1]])) continue;
    let place = Math.min(top.length, TOP - 1);
    while (place > 0 && logit > logits[top[place - 1]]) {
      top[place] = top[place - 1];
      place -= 1;
    }
    top[place] = id;
  }
  for (let id = 0; id < logits.length; id += 1) total += Math.exp(logits[id] - most);
  const normaliser = most + Math.log(total);
  score.normaliser.push(normaliser);
  score.top.push(top.map((id) => ({ id, logprob: logits[id] - normaliser })));
}

/** Writes the softmax of logits to another place in memory, which may be the same. */
function becomeProbabilities(logits, to) {
  let [most, total] = [-Infinity, 0];
  for (const logit of logits) if (logit > most) most = logit;
  for (let id = 0; id < logits.length; id += 1) total += to[id] = Math.exp(logits[id] - most);
  for (let id = 0; id < to.length; id += 1) to[id] /= total;
}
