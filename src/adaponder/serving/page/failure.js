/** An error whose message the page shows. `retryAfter` is the delay of a retry in seconds, `null` if a retry is pointless;
 * `tokens` is the number of tokens of a text that is too long, otherwise `null`. */
export class Failure extends Error {
  constructor(message, { retryAfter = null, tokens = null } = {}) {
    super(message);
    Object.assign(this, { retryAfter, tokens });
  }
}
