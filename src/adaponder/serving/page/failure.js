/** An error whose message the page shows; `retryAfter` is in seconds, `null` if a retry is pointless; `tokens` is the length of a
 * text that is too long. */
export class Failure extends Error {
  constructor(message, { retryAfter = null, tokens = null } = {}) {
    super(message);
    Object.assign(this, { retryAfter, tokens });
  }
}
