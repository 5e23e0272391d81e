// Asks the server for readings of the text: one question at a time, only the newest answer is shown, and what takes
// longer (predictions after each iteration, full depth) follows when the text rests. A question goes out at once, before
// the browser draws the keystroke; what changes while one is under way is asked for after it.

import { score } from "./api.js";
import { asked } from "./rules.js";

const REST = 300; // ms after an answer
const TOP = 5;

/** Whether every question asks for predictions, and not only those about a text that rests. */
export const always = { predictions: false };

/** The body of a question. */
export function question({ text, ids, forced, seed }, rule) {
  const body = { prompt: ids ?? text, adaponder: { ...asked(rule), gates: true } };
  if (always.predictions) body.adaponder.iteration_top = TOP;
  // Chance falls here as it does in writing.
  if (rule.startsWith("random")) body.adaponder.seed = seed;
  if (Object.keys(forced).length) body.adaponder.depths = forced;
  return body;
}

export class Reader {
  /** `shown(answer, detailed)` gets answers, `failed(failure)` sentences to show, `null` once all is well. */
  constructor({ shown, failed }) {
    Object.assign(this, { shown, failed, wanted: null, busy: false, answered: "", timer: 0, tries: 0, detail: null });
  }

  /** Asks as soon as no other question is under way; `null`: there is nothing to read. */
  want(body) {
    this.wanted = body;
    clearTimeout(this.timer);
    this.detail?.abort();
    this.detail = null;
    this.tries = 0;
    if (body) this.pump();
    else this.answered = "";
  }

  async pump() {
    const body = this.wanted;
    if (this.busy || !body) return;
    if (JSON.stringify(body) === this.answered) {
      this.rest(body);
      return;
    }
    this.busy = true;
    try {
      const answer = await score(body);
      this.tries = 0;
      this.failed(null);
      // An answer about another text than the one on the page is not shown; one about an earlier dial is, on the way.
      if (this.wanted && JSON.stringify(this.wanted.prompt) === JSON.stringify(body.prompt)) {
        this.answered = JSON.stringify(body);
        this.shown(answer, false);
      }
    } catch (failure) {
      if (body === this.wanted) this.stumble(failure);
    } finally {
      this.busy = false;
    }
    if (body !== this.wanted) this.pump();
    else if (JSON.stringify(body) === this.answered) this.rest(body);
  }

  /** Asks for the rest once nothing has changed for a while. */
  rest(body) {
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const aborter = new AbortController();
      this.detail = aborter;
      const whole = { ...body, full_depth: true, adaponder: { ...body.adaponder, iteration_top: TOP } };
      try {
        const answer = await score(whole, aborter.signal);
        if (body === this.wanted) this.shown(answer, true);
      } catch (failure) {
        if (failure.name !== "AbortError" && body === this.wanted) this.stumble(failure);
      }
    }, REST);
  }

  /** Says what went wrong and tries again where that may help, more slowly each time. */
  stumble(failure) {
    this.answered = "";
    if (failure.again === null || failure.again === undefined) {
      this.failed(failure);
      return;
    }
    const wait = Math.min(15, failure.again * 1.5 ** this.tries);
    this.tries += 1;
    this.failed(failure, wait);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.pump(), 1000 * wait);
  }
}
