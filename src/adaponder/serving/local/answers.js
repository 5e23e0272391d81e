// Answers the requests that the page makes, with the same fields as the server, from a model in this browser.

import { sample } from "./policies.js";

export class Answers {
  /** `facts`: the contents of model.json, which are the facts of the server's `/v1/models` and `local`. */
  constructor(facts, model, tokenizer) {
    Object.assign(this, { facts, local: model.facts, model, tokenizer });
  }

  /** Returns the token ids of a prompt, which is a text or ids from a link. */
  ids(prompt) {
    const ids = typeof prompt === "string" ? this.tokenizer.encode(prompt) : prompt;
    const { positions, vocabulary } = this.facts;
    if (!ids.length) throw new Error("The text has no tokens.");
    const tokens = ids.length;
    if (tokens > positions) {
      throw Object.assign(new Error(`The text has ${tokens} tokens, but the model has only ${positions} positions; shorten it.`), { tokens });
    }
    const invalid = ids.find((id) => !(id >= 0 && id < vocabulary));
    if (invalid !== undefined) throw new Error(`The link contains token id ${invalid}; this model's ids end at ${vocabulary - 1}.`);
    return ids;
  }

  /** Returns the request's policy; a mean depth becomes thresholds interpolated between two calibrated ones. */
  policyLine({ policy, budget }) {
    const { iterations, calibrated, default_policy: defaultPolicy } = this.local;
    if (budget === undefined) return policy ?? defaultPolicy;
    if (budget === 1 || budget === iterations) return `fixed:${budget}`;
    const all = (value) => new Array(iterations - 1).fill(value);
    const points = [[1, all(1)], ...calibrated, [iterations, all(0)]];
    const above = points.findIndex(([depth]) => depth >= budget);
    const [[low, lowTaus], [high, highTaus]] = [points[above - 1], points[above]];
    const share = (budget - low) / (high - low);
    return `gate:${lowTaus.map((tau, gate) => (1 - share) * tau + share * highTaus[gate]).join(",")}`;
  }

  /** Runs the model on token ids, yielding between chunks; returns the model's cached `Text` with their scores. */
  *run(ids, line, { depths: forced = {}, seed = 0 }) {
    const policy = this.model.policy(line);
    const text = this.model.textFor(policy.seeded ? `${line} ${seed}` : line, ids, forced);
    yield* this.model.run(text, ids, policy, { forced, seed });
    return text;
  }

  /** Computes the answer of `/score`, yielding between chunks of the text. */
  *score({ prompt, adaponder: options, full_depth: full }) {
    const started = performance.now();
    const { model, local, tokenizer } = this;
    const ids = this.ids(prompt);
    const line = this.policyLine(options);
    const { scores, cached } = yield* this.run(ids, line, options);
    const fullScores = full ? (yield* this.run(ids, local.halts ? `fixed:${local.iterations}` : line, {})).scores : null;
    const texts = tokenizer.pieces(ids);
    const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
    const tokens = ids.map((id, slot) => {
      const losses = slot ? model.losses(scores[slot - 1], id) : [];
      return {
        id,
        text: texts[slot],
        nll: slot ? losses.at(-1) : null,
        nll_by_iteration: losses,
        ...this.positionFields(scores[slot], options),
        ...(fullScores ? { full_nll: slot ? model.losses(fullScores[slot - 1], id).at(-1) : null } : {}),
      };
    });
    const depths = scores.map(({ depth }) => depth);
    const loss = mean(tokens.slice(1).map(({ nll }) => nll));
    const fullCost = this.cost(new Array(ids.length).fill(local.iterations), line);
    const cost = this.cost(depths, line);
    return {
      object: "score",
      model: this.facts.name,
      policy: line,
      loss,
      perplexity: loss === null ? null : Math.exp(Math.min(loss, 700)),
      mean_depth: mean(depths),
      unknown_tokens: ids.filter((id) => id === local.unknown_id).length,
      ...(fullScores ? { full_loss: mean(tokens.slice(1).map((token) => token.full_nll)) } : {}),
      usage: { tokens: ids.length, cached_tokens: cached, iterations: depths.reduce((sum, depth) => sum + depth, 0), ...cost, flops_full_depth: fullCost.flops, flops_vanilla: this.vanilla(ids.length), kv_bytes_full_depth: fullCost.kv_bytes },
      seconds: (performance.now() - started) / 1000,
      tokens,
    };
  }

  /** Returns the answer's fields about one position: depth, gates and predictions. */
  positionFields({ depth, gates, top }, { iteration_top: count = 0 }) {
    const spelled = ({ id, logprob }) => ({ id, text: this.tokenizer.spelled(id), logprob });
    return { depth, gates, ...(count ? { iteration_top: top.map((tokens) => tokens.slice(0, count).map(spelled)) } : {}) };
  }

  /** Yields the chunks of a completion, one per token, and `undefined` between chunks of the text. */
  *complete({ prompt, max_tokens: maxTokens, temperature, seed, adaponder: options }) {
    const { model, tokenizer, local } = this;
    const ids = [...prompt];
    const seeded = { ...options, seed };
    const line = this.policyLine(options);
    const decode = tokenizer.streamDecoder();
    ids.forEach(decode);
    let count = 0;
    for (let reason = null; reason === null; ) {
      const { scores } = yield* this.run(ids, line, seeded);
      const last = scores.at(-1);
      const token = sample(model.logits([{ hidden: last.hidden.at(-1) }])(0), { temperature, seed, position: ids.length - 1 });
      const ends = local.end_ids.includes(token);
      count += 1;
      if (ends) reason = "stop";
      else if (count === maxTokens) reason = "length";
      const text = (ends ? "" : decode(token)) + (reason ? decode() : "");
      const adaponder = { tokens: [{ id: token, text, ...this.positionFields(last, options) }] };
      if (count === 1) adaponder.prompt_depths = scores.map(({ depth }) => depth);
      yield { choices: [{ index: 0, text, finish_reason: reason, adaponder }] };
      ids.push(token);
    }
  }

  /** Returns FLOPs and KV cache bytes of a text whose tokens have these depths, as `adaponder.methods.cost` computes them. */
  cost(depths, line) {
    const { backbone, gate_flops: gateFlops, gates_asked: gatesAsked, iterations, mixes, halts, cost } = this.local;
    const policy = halts ? this.model.policy(line) : null;
    const head = 2 * backbone.vocabulary * backbone.hidden;
    let [flops, rows] = [head * depths.length, 0];
    for (let iteration = 0; iteration < iterations; iteration += 1) {
      let [active, pairs] = [0, 0];
      depths.forEach((depth, slot) => {
        if (depth > iteration) [active, pairs] = [active + 1, pairs + slot + 1];
      });
      rows += active;
      flops += 2 * cost.body * active + 2 * cost.attention * pairs;
      if (iteration && mixes) flops += 2 * head * active;
      if (iteration < gatesAsked) flops += gateFlops * active;
      if (policy && iteration < iterations - 1) flops += head * policy.heads(iteration) * active;
    }
    return { flops, kv_bytes: 4 * cost.kv * rows };
  }

  /** Returns the FLOPs of the decoder without recurrence, which reads every token once. */
  vanilla(tokens) {
    const { backbone, cost } = this.local;
    return tokens * (2 * backbone.vocabulary * backbone.hidden + 2 * cost.body + cost.attention * (tokens + 1));
  }
}
