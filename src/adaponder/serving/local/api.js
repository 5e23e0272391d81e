// Answers the page's requests with a model in this browser: the same functions as page/api.js, over a worker.

import { Failure } from "./failure.js";

export { Failure };

/** What happens to the visitor's text, for the footer. */
export const PRIVACY = "The model runs in this browser: nothing you type leaves it";

let worker = null;
let count = 0;
const listeners = new Map(); // by id of their request

function start() {
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.addEventListener("message", ({ data }) => listeners.get(data.id)?.(data));
  worker.addEventListener("error", (event) => {
    for (const listener of [...listeners.values()]) listener({ problem: event.message || "The model could not be started." });
  });
}

/** Yields the parts of the worker's answer; returns its result. */
async function* request(kind, body, signal) {
  if (!worker) start();
  const id = (count += 1);
  const messages = [];
  let wake = null;
  const listener = (message) => {
    messages.push(message);
    wake?.();
  };
  const stop = () => {
    worker.postMessage({ stop: id });
    listener({ stopped: true });
  };
  listeners.set(id, listener);
  signal?.addEventListener("abort", stop);
  worker.postMessage({ id, kind, body });
  try {
    for (;;) {
      while (!messages.length) await new Promise((resolve) => (wake = resolve));
      const { part, done, problem, tokens, stopped } = messages.shift();
      if (stopped) throw new DOMException("The request was stopped.", "AbortError");
      if (problem !== undefined) throw new Failure(problem, { tokens });
      if (part === undefined) return done;
      yield part;
    }
  } finally {
    listeners.delete(id);
    signal?.removeEventListener("abort", stop);
  }
}

const result = async (...args) => (await request(...args).next()).value;

/** Returns the model's name and its `adaponder` facts. */
export const model = () => result("model");

/** Returns the `/score` answer for a text: depth, loss and more of each token. */
export const score = (body, signal) => result("score", body, signal);

/** Yields the chunks of a completion. */
export const complete = (body, signal) => request("complete", body, signal);
