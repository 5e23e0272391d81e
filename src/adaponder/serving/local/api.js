// The page's questions, answered by a model in this browser: the functions of the server's api.js over a worker.

import { Failure } from "./failure.js";

export { Failure };

/** Where a text goes, for the foot of the page. */
export const PRIVACY = "The model runs in this browser: nothing you type leaves it";

let worker = null;
let count = 0;
const waiting = new Map(); // listeners by the number of their question

function start() {
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.addEventListener("message", ({ data }) => waiting.get(data.id)?.(data));
  worker.addEventListener("error", (event) => {
    for (const listener of [...waiting.values()]) listener({ problem: event.message || "The model could not be started." });
  });
}

/** Yields the parts of an answer; returns its end. */
async function* ask(kind, body, signal) {
  if (!worker) start();
  const id = (count += 1);
  const heard = [];
  let wake = null;
  const tell = (message) => {
    heard.push(message);
    wake?.();
  };
  const stop = () => {
    worker.postMessage({ stop: id });
    tell({ stopped: true });
  };
  waiting.set(id, tell);
  signal?.addEventListener("abort", stop);
  worker.postMessage({ id, kind, body });
  try {
    for (;;) {
      while (!heard.length) await new Promise((resolve) => (wake = resolve));
      const { part, done, problem, tokens, stopped } = heard.shift();
      if (stopped) throw new DOMException("It was stopped.", "AbortError");
      if (problem !== undefined) throw new Failure(problem, { tokens });
      if (part === undefined) return done;
      yield part;
    }
  } finally {
    waiting.delete(id);
    signal?.removeEventListener("abort", stop);
  }
}

const whole = async (...question) => (await ask(...question).next()).value;

/** The model: its name and what `adaponder` says of it. */
export const model = () => whole("model");

/** Depth, loss and more of each token of a text. */
export const score = (body, signal) => whole("score", body, signal);

/** Yields the chunks of a completion. */
export const complete = (body, signal) => ask("complete", body, signal);
