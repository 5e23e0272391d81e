// What the page shows, in one object, and the same in the URL's fragment, which browsers never send to a server.

import { debounced } from "./dom.js";

const START = {
  text: "",
  ids: null, // the exact tokens of the text, where they are known from generation
  forced: {}, // depth by slot
  a: null, // a rule, as in rules.js
  b: null, // a second one to compare with
  difference: false, // colour the second reading by how it differs
  selected: null, // slot under inspection
  temperature: 0.7,
  seed: 1,
  most: 64,
};

export const state = { ...START };
const listeners = [];

/** Calls `listener(changed)` after each change, with the set of names that changed. */
export function watch(listener) {
  listeners.push(listener);
}

/** Sets fields and tells all listeners once. */
export function set(changes) {
  const changed = new Set();
  for (const [name, value] of Object.entries(changes)) {
    if (JSON.stringify(state[name]) === JSON.stringify(value)) continue;
    state[name] = value;
    changed.add(name);
  }
  if (changed.size) for (const listener of listeners) listener(changed);
}

const numbers = (text) => text.split(".").filter((part) => /^\d+$/.test(part)).map(Number);

/** The fragment that `fromFragment` reads back. */
export function toFragment() {
  const fields = new URLSearchParams();
  fields.set("text", state.text);
  if (state.ids) fields.set("ids", state.ids.join("."));
  if (state.a) fields.set("a", state.a);
  if (state.b) fields.set("b", state.b);
  if (state.difference) fields.set("show", "difference");
  const forced = Object.entries(state.forced);
  if (forced.length) fields.set("forced", forced.map(([slot, depth]) => `${slot}-${depth}`).join("."));
  if (state.selected !== null) fields.set("token", state.selected);
  for (const name of ["temperature", "seed", "most"]) {
    if (state[name] !== START[name]) fields.set(name, state[name]);
  }
  return fields.toString();
}

/** The fields that a fragment names, with what it does not name as at the start; `null` without a text. */
export function fromFragment(fragment) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!fields.has("text")) return null;
  const found = { ...START, forced: {}, text: fields.get("text").replace(/\r\n?/g, "\n") };
  const ids = numbers(fields.get("ids") ?? "");
  if (ids.length) found.ids = ids;
  found.a = fields.get("a");
  found.b = fields.get("b");
  found.difference = fields.get("show") === "difference";
  for (const pair of (fields.get("forced") ?? "").split(".")) {
    const parts = /^(\d+)-(\d+)$/.exec(pair);
    if (parts) found.forced[parts[1]] = Number(parts[2]);
  }
  if (/^\d+$/.test(fields.get("token") ?? "")) found.selected = Number(fields.get("token"));
  for (const name of ["temperature", "seed", "most"]) {
    const value = Number(fields.get(name) ?? NaN);
    if (fields.has(name) && Number.isFinite(value) && value >= 0) found[name] = value;
  }
  return found;
}

let written = "";

const write = debounced(() => {
  written = `#${toFragment()}`;
  history.replaceState(null, "", written);
}, 250);

/** Keeps the address in step with the state; `arrived` is called with the fields of an address that was followed. */
export function keepAddress(arrived) {
  watch(write);
  addEventListener("hashchange", (event) => {
    // Not location.hash: what was waiting to be written may stand there again by now.
    const { hash } = new URL(event.newURL);
    if (hash === written) return;
    const found = fromFragment(hash);
    if (found) arrived(found);
  });
}

/** The address of what is shown now. */
export function address() {
  return `${location.href.split("#")[0]}#${toFragment()}`;
}
