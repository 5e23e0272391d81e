// Runs the model in a worker: answers requests one after another. Answers are computed in steps, between which the worker
// receives messages, so that a request can be stopped.

import { Answers } from "./answers.js";
import { Model } from "./model.js";
import { Tokenizer } from "./tokenizer.js";
import { tensors } from "./weights.js";

const MODEL = new URL("../model/", import.meta.url);

async function file(name) {
  const response = await fetch(new URL(name, MODEL));
  if (!response.ok) throw new Error(`The page's file model/${name} could not be loaded (status ${response.status}).`);
  return response;
}

async function open() {
  const [facts, tokenizer, weights] = await Promise.all([
    file("model.json").then((answer) => answer.json()),
    file("tokenizer.json").then((answer) => answer.json()),
    file("model.safetensors").then((answer) => answer.arrayBuffer()),
  ]);
  return new Answers(facts, new Model(facts.local, tensors(weights)), new Tokenizer(tokenizer));
}

const opened = open();
const stopped = new Set(); // ids of requests
let queue = Promise.resolve();

// Yields to the event loop, so that waiting messages are handled; unlike setTimeout, without a minimum delay.
const { port1, port2 } = new MessageChannel();
const yieldToMessages = () =>
  new Promise((resolve) => {
    port2.onmessage = resolve;
    port1.postMessage(null);
  });

async function answer({ id, kind, body }) {
  try {
    const answers = await opened;
    if (kind === "model") {
      postMessage({ id, done: answers.facts });
      return;
    }
    const steps = answers[kind](body);
    for (;;) {
      if (stopped.delete(id)) return;
      const { done, value } = steps.next();
      if (done) {
        postMessage({ id, done: value ?? null });
        return;
      }
      if (value !== undefined) postMessage({ id, part: value });
      await yieldToMessages();
    }
  } catch (error) {
    postMessage({ id, problem: error.message, tokens: error.tokens });
  }
}

addEventListener("message", ({ data }) => {
  if (data.stop) stopped.add(data.stop);
  else queue = queue.then(() => answer(data));
});
