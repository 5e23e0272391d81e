// What the server's routes answer, from a model in this browser: the same fields, for as much of a request as the page asks.

import { draw } from "./policies.js";

/** A sentence to show; the page says it in a line above the text. */
export class Refusal extends Error {}

export class Answers {
  /** `facts` describe the model as the server's `/v1/models` does, with what else the browser must know under `local`. */
  constructor(facts, model, tokenizer) {
    Object.assign(this, { facts, local: model.facts, model, tokenizer });
  }

  ids(prompt) {
    const ids = typeof prompt === "string" ? this.tokenizer.encode(prompt) : prompt;
    const { positions, vocabulary } = this.facts;
    if (!ids.length) throw new Refusal("The text has no tokens.");
    const tokens = ids.length;
    if (tokens > positions) {
      throw Object.assign(new Refusal(`The text has ${tokens} tokens, and the model's positions end at ${positions}; shorten it.`), { tokens });
    }
    const wrong = ids.find((id) => !(id >= 0 && id < vocabulary));
    if (wrong !== undefined) throw new Refusal(`The link names token ${wrong}; this model's end at ${vocabulary - 1}.`);
    return ids;
  }

  /** The line of the rule that a request names; a mean depth becomes thresholds between two calibrated ones. */
  line({ policy, budget }) {
    const { iterations, calibrated, default_policy: own } = this.local;
    if (budget === undefined) return policy ?? own;
    if (budget === 1 || budget === iterations) return `fixed:${budget}`;
    const all = (value) => new Array(iterations - 1).fill(value);
    const points = [[1, all(1)], ...calibrated, [iterations, all(0)]];
    const above = points.findIndex(([depth]) => depth >= budget);
    const [[low, before], [high, after]] = [points[above - 1], points[above]];
    const share = (budget - low) / (high - low);
    return `gate:${before.map((tau, gate) => (1 - share) * tau + share * after[gate]).join(",")}`;
  }

  /** Reads a text, yielding between parts of it; returns it with its scores. */
  *read(ids, line, { depths: forced = {}, seed = 0 }) {
    const policy = this.model.policy(line);
    const text = this.model.textFor(policy.seeded ? `${line} ${seed}` : line, ids, forced);
    yield* this.model.read(text, ids, policy, { forced, seed });
    return text;
  }

  /** What `/score` answers. */
  *score({ prompt, adaponder: how, full_depth: full }) {
    const began = performance.now();
    const { model, local, tokenizer } = this;
    const ids = this.ids(prompt);
    const line = this.line(how);
    const { scores, kept } = yield* this.read(ids, line, how);
    const whole = full ? (yield* this.read(ids, local.halts ? `fixed:${local.iterations}` : line, {})).scores : null;
    const texts = tokenizer.pieces(ids);
    const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
    const tokens = ids.map((id, slot) => {
      const losses = slot ? model.losses(scores[slot - 1], id) : [];
      return {
        id,
        text: texts[slot],
        nll: slot ? losses.at(-1) : null,
        nll_by_iteration: losses,
        ...this.reading(scores[slot], how),
        ...(whole ? { full_nll: slot ? model.losses(whole[slot - 1], id).at(-1) : null } : {}),
      };
    });
    const depths = scores.map(({ depth }) => depth);
    const loss = mean(tokens.slice(1).map(({ nll }) => nll));
    const most = this.cost(new Array(ids.length).fill(local.iterations), line);
    const spent = this.cost(depths, line);
    return {
      object: "score",
      model: this.facts.name,
      policy: line,
      loss,
      perplexity: loss === null ? null : Math.exp(Math.min(loss, 700)),
      mean_depth: mean(depths),
      unknown_tokens: ids.filter((id) => id === local.unknown_id).length,
      ...(whole ? { full_loss: mean(tokens.slice(1).map((token) => token.full_nll)) } : {}),
      usage: { tokens: ids.length, cached_tokens: kept, iterations: depths.reduce((sum, depth) => sum + depth, 0), ...spent, flops_full_depth: most.flops, flops_vanilla: this.vanilla(ids.length), kv_bytes_full_depth: most.kv_bytes },
      seconds: (performance.now() - began) / 1000,
      tokens,
    };
  }

  /** Depth, gates and predictions of a score, as an answer lists them. */
  reading({ depth, gates, top }, { iteration_top: most = 0 }) {
    const spelled = ({ id, logprob }) => ({ id, text: this.tokenizer.spelled(id), logprob });
    return { depth, gates, ...(most ? { iteration_top: top.map((likeliest) => likeliest.slice(0, most).map(spelled)) } : {}) };
  }

  /** The chunks of a completion: one per token, as the model writes it. */
  *complete({ prompt, max_tokens: most, temperature, seed, adaponder: how }) {
    const { model, tokenizer, local } = this;
    const ids = [...prompt];
    const policy = { ...how, seed };
    const line = this.line(how);
    const spell = tokenizer.speller();
    ids.forEach(spell);
    let written = 0;
    for (let reason = null; reason === null; ) {
      const { scores } = yield* this.read(ids, line, policy);
      const last = scores.at(-1);
      const token = draw(model.logits([{ hidden: last.hidden.at(-1) }])(0), { temperature, seed, position: ids.length - 1 });
      const ends = local.end_ids.includes(token);
      written += 1;
      if (ends) reason = "stop";
      else if (written === most) reason = "length";
      const text = (ends ? "" : spell(token)) + (reason ? spell() : "");
      const adaponder = { tokens: [{ id: token, text, ...this.reading(last, how) }] };
      if (written === 1) adaponder.prompt_depths = scores.map(({ depth }) => depth);
      yield { choices: [{ index: 0, text, finish_reason: reason, adaponder }] };
      ids.push(token);
    }
  }

  /** FLOPs and bytes of keys and values of a text of these depths: `adaponder.methods.cost` without what is not there. */
  cost(depths, line) {
    const { backbone, gate_flops: gateFlops, gates_asked: asked, iterations, mixes, halts, cost } = this.local;
    const policy = halts ? this.model.policy(line) : null;
    const head = 2 * backbone.vocabulary * backbone.hidden;
    let [flops, reads] = [head * depths.length, 0];
    for (let iteration = 0; iteration < iterations; iteration += 1) {
      let [active, pairs] = [0, 0];
      depths.forEach((depth, slot) => {
        if (depth > iteration) [active, pairs] = [active + 1, pairs + slot + 1];
      });
      reads += active;
      flops += 2 * cost.body * active + 2 * cost.attention * pairs;
      if (iteration && mixes) flops += 2 * head * active;
      if (iteration < asked) flops += gateFlops * active;
      if (policy && iteration < iterations - 1) flops += head * policy.heads(iteration) * active;
    }
    return { flops, kv_bytes: 4 * cost.kv * reads };
  }

  /** FLOPs of the decoder without recurrence, which reads every token once. */
  vanilla(tokens) {
    const { backbone, cost } = this.local;
    return tokens * (2 * backbone.vocabulary * backbone.hidden + 2 * cost.body + cost.attention * (tokens + 1));
  }
}
