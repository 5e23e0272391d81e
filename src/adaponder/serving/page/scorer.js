// Scores the text on the page: one request at a time, and only the newest answer is shown. A request is sent at once, before
// the browser paints the keystroke; a change during a request is sent after it. What takes longer (predictions after each
// iteration, full depth) is requested once the text has not changed for a while.

import { score } from "./api.js";
import { requestFields } from "./rules.js";

const IDLE = 300; // ms between an answer and the request for details
const TOP = 5; // predictions per iteration

/** `predictions`: whether all requests ask for predictions, and not only the requests for details. */
export const scoreDefaults = { predictions: false };

/** Returns the body of a `/score` request. */
export function scoreRequest({ text, ids, forced, seed }, rule) {
  const body = { prompt: ids ?? text, adaponder: { ...requestFields(rule), gates: true } };
  if (scoreDefaults.predictions) body.adaponder.iteration_top = TOP;
  // With the seed of the generation, the random depths are the same as there.
  if (rule.startsWith("random")) body.adaponder.seed = seed;
  if (Object.keys(forced).length) body.adaponder.depths = forced;
  return body;
}

export class Scorer {
  /** `onScores(scores, detailed)` receives answers; `onFailure(failure, wait)` errors, and `null` once a request succeeds. */
  constructor({ onScores, onFailure }) {
    Object.assign(this, { onScores, onFailure, wanted: null, busy: false, answered: "", timer: 0, tries: 0, details: null });
  }

  /** Sends a request once the running one has ended; `null` if there is nothing to score. */
  request(body) {
    this.wanted = body;
    clearTimeout(this.timer);
    this.details?.abort();
    this.details = null;
    this.tries = 0;
    if (body) this.send();
    else this.answered = "";
  }

  async send() {
    const body = this.wanted;
    if (this.busy || !body) return;
    if (JSON.stringify(body) === this.answered) {
      this.requestDetails(body);
      return;
    }
    this.busy = true;
    try {
      const scores = await score(body);
      this.tries = 0;
      this.onFailure(null);
      // While a slider moves, answers for earlier positions are shown too; answers for another text are not.
      if (this.wanted && JSON.stringify(this.wanted.prompt) === JSON.stringify(body.prompt)) {
        this.answered = JSON.stringify(body);
        this.onScores(scores, false);
      }
    } catch (failure) {
      if (body === this.wanted) this.fail(failure);
    } finally {
      this.busy = false;
    }
    if (body !== this.wanted) this.send();
    else if (JSON.stringify(body) === this.answered) this.requestDetails(body);
  }

  /** Asks for predictions and full depth once nothing has changed for a while. */
  requestDetails(body) {
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const aborter = new AbortController();
      this.details = aborter;
      const detailed = { ...body, full_depth: true, adaponder: { ...body.adaponder, iteration_top: TOP } };
      try {
        const scores = await score(detailed, aborter.signal);
        if (body === this.wanted) this.onScores(scores, true);
      } catch (failure) {
        if (failure.name !== "AbortError" && body === this.wanted) this.fail(failure);
      }
    }, IDLE);
  }

  /** Reports a failure, and retries with growing delays if that may help. */
  fail(failure) {
    this.answered = "";
    if (failure.retryAfter === null || failure.retryAfter === undefined) {
      this.onFailure(failure);
      return;
    }
    const wait = Math.min(15, failure.retryAfter * 1.5 ** this.tries);
    this.tries += 1;
    this.onFailure(failure, wait);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send(), 1000 * wait);
  }
}
