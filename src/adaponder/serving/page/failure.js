// What every failure becomes: a sentence to show and, where waiting may help, a delay.

/** What went wrong; `again` is after how many seconds a further try makes sense, `null` where none does. */
export class Failure extends Error {
  constructor(message, { again = null, status = 0, gone = false, tokens = null } = {}) {
    super(message);
    Object.assign(this, { again, status, gone, tokens });
  }
}
