// Writing on: tokens arrive one by one, and each shows its depth once the token after it is there.

import { complete } from "./api.js";
import { asked } from "./rules.js";

/**
 * A run of the model from a prompt of token ids. A generated token tells the depth of the row that predicted it, which
 * is the token before it: so `tokens[i + 1]` of the answer gives depth, gates and predictions of token i.
 */
export class Writing {
  /** `prompt` are tokens `{id, text, depth?…}`; `grown(writing)` is called as tokens come. */
  constructor({ model, prompt, rule, forced, temperature, seed, most, grown }) {
    Object.assign(this, { model, prompt, rule, forced, temperature, seed, most, grown });
    this.tokens = prompt.map((token) => ({ ...token }));
    this.made = 0;
    this.began = 0;
    this.last = 0;
    this.reason = null;
    this.usage = null;
    this.aborter = new AbortController();
  }

  /** Tokens per second between the first and the last token. */
  get speed() {
    return this.made > 1 && this.last > this.began ? (1000 * (this.made - 1)) / (this.last - this.began) : null;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  stop() {
    this.aborter.abort();
  }

  /** Runs to its end, or until it is stopped. */
  async run() {
    const body = {
      model: this.model,
      prompt: this.prompt.map((token) => token.id),
      max_tokens: this.most,
      temperature: this.temperature,
      seed: this.seed,
      adaponder: { ...asked(this.rule), depth: true, gates: true, iteration_top: 5 },
    };
    if (Object.keys(this.forced).length) body.adaponder.depths = this.forced;
    try {
      for await (const chunk of complete(body, this.aborter.signal)) this.take(chunk);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      this.reason = "stopped";
    }
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    choice.adaponder?.prompt_depths?.forEach((depth, slot) => {
      if (this.tokens[slot]) this.tokens[slot].depth = depth;
    });
    for (const token of choice.adaponder?.tokens ?? []) {
      const before = this.tokens.at(-1);
      Object.assign(before, { depth: token.depth, gates: token.gates ?? before.gates });
      if (token.iteration_top?.length) before.iteration_top = token.iteration_top;
      this.tokens.push({ id: token.id, text: token.text, depth: null, nll: null, written: true });
      this.last = performance.now();
      if (!this.made) this.began = this.last;
      this.made += 1;
    }
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.grown(this);
  }

  /** All tokens but an end-of-text token, which has no text and nothing can follow. */
  get kept() {
    const last = this.tokens.at(-1);
    return this.reason === "stop" && this.made && last?.text === "" ? this.tokens.slice(0, -1) : this.tokens;
  }
}
