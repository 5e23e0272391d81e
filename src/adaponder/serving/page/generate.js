// Generates text: tokens arrive one by one, and the depth of each is known once the token after it has arrived.

import { complete } from "./api.js";
import { requestFields } from "./rules.js";

/**
 * One completion of a prompt of token ids. With each generated token the server sends depth, gates and predictions of the
 * token before it, from which it was predicted.
 */
export class Generation {
  /** `prompt` holds tokens `{id, text, depth?…}`; `onProgress(generation)` is called as tokens arrive. */
  constructor({ model, prompt, rule, forced, temperature, seed, maxTokens, onProgress }) {
    Object.assign(this, { model, prompt, rule, forced, temperature, seed, maxTokens, onProgress });
    this.tokens = prompt.map((token) => ({ ...token }));
    this.count = 0; // generated tokens
    this.firstTime = 0;
    this.lastTime = 0;
    this.finishReason = null;
    this.aborter = new AbortController();
  }

  /** Returns the tokens per second between the first and the last token; `null` for fewer than two. */
  get speed() {
    return this.count > 1 && this.lastTime > this.firstTime ? (1000 * (this.count - 1)) / (this.lastTime - this.firstTime) : null;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  stop() {
    this.aborter.abort();
  }

  /** Runs until the completion ends or is stopped. */
  async run() {
    const body = {
      model: this.model,
      prompt: this.prompt.map((token) => token.id),
      max_tokens: this.maxTokens,
      temperature: this.temperature,
      seed: this.seed,
      adaponder: { ...requestFields(this.rule), depth: true, gates: true, iteration_top: 5 },
    };
    if (Object.keys(this.forced).length) body.adaponder.depths = this.forced;
    try {
      for await (const chunk of complete(body, this.aborter.signal)) this.append(chunk);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      this.finishReason = "stopped";
    }
  }

  append(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice) return;
    choice.adaponder?.prompt_depths?.forEach((depth, slot) => {
      if (this.tokens[slot]) this.tokens[slot].depth = depth;
    });
    for (const token of choice.adaponder?.tokens ?? []) {
      const predictor = this.tokens.at(-1);
      Object.assign(predictor, { depth: token.depth, gates: token.gates ?? predictor.gates });
      if (token.iteration_top?.length) predictor.iteration_top = token.iteration_top;
      this.tokens.push({ id: token.id, text: token.text, depth: null, nll: null });
      this.lastTime = performance.now();
      if (!this.count) this.firstTime = this.lastTime;
      this.count += 1;
    }
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    this.onProgress(this);
  }

  /** Returns all tokens except a final end-of-text token, which has no text and cannot be continued. */
  get textTokens() {
    const last = this.tokens.at(-1);
    return this.finishReason === "stop" && this.count && last?.text === "" ? this.tokens.slice(0, -1) : this.tokens;
  }
}
