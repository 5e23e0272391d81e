// The model in a worker: answers questions one after another, and hears between two parts of an answer whether it is
// still wanted.

import { Answers } from "./answers.js";
import { Model } from "./model.js";
import { Tokenizer } from "./tokenizer.js";
import { tensors } from "./weights.js";

const MODEL = new URL("../model/", import.meta.url);

async function file(name) {
  const response = await fetch(new URL(name, MODEL));
  if (!response.ok) throw new Error(`The file model/${name} is missing beside this page (${response.status}).`);
  return response;
}

async function open() {
  const [facts, spelling, weights] = await Promise.all([
    file("model.json").then((answer) => answer.json()),
    file("tokenizer.json").then((answer) => answer.json()),
    file("model.safetensors").then((answer) => answer.arrayBuffer()),
  ]);
  return new Answers(facts, new Model(facts.local, tensors(weights)), new Tokenizer(spelling));
}

const opened = open();
const unwanted = new Set();
let line = Promise.resolve();

/** Lets messages in that have arrived meanwhile. */
const { port1: bell, port2: ear } = new MessageChannel();
const pause = () =>
  new Promise((resolve) => {
    ear.onmessage = resolve;
    bell.postMessage(null);
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
      if (unwanted.delete(id)) return;
      const { done, value } = steps.next();
      if (done) {
        postMessage({ id, done: value ?? null });
        return;
      }
      if (value !== undefined) postMessage({ id, part: value });
      await pause();
    }
  } catch (error) {
    postMessage({ id, problem: error.message, tokens: error.tokens });
  }
}

addEventListener("message", ({ data }) => {
  if (data.stop) unwanted.add(data.stop);
  else line = line.then(() => answer(data));
});
