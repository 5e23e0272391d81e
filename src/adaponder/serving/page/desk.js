// The row of controls that makes the model write: start, stop, again, and how.

import { byId } from "./dom.js";
import { Writing } from "./generate.js";
import { figure } from "./spelling.js";
import { set, state } from "./state.js";

const FIELDS = { most: "most", temperature: "temperature", seed: "seed" };
const WHY = { length: "", stop: "end of text", stopped: "stopped", cancelled: "stopped", error: "failed" };

export class Desk {
  /** `tokens()` resolves to the tokens of the text; `grown` and `ended` get the writing. */
  constructor({ notice, grown, ended, tokens }) {
    Object.assign(this, { notice, grown, ended, tokens, writing: null, last: null, wrote: null, model: null });
    byId("continue").addEventListener("click", () => (this.busy ? this.stop() : this.write({})));
    byId("again").addEventListener("click", () => this.again());
    for (const [id, name] of Object.entries(FIELDS)) {
      byId(id).addEventListener("change", () => {
        const value = byId(id).valueAsNumber;
        if (Number.isFinite(value) && value >= 0) set({ [name]: name === "temperature" ? value : Math.round(value) });
        byId(id).value = String(state[name]);
      });
    }
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) {
        event.preventDefault();
        this.write({});
      }
      if (event.key === "Escape" && this.busy) this.stop();
    });
  }

  get busy() {
    return this.writing !== null;
  }

  open(model) {
    this.model = model;
    this.changed(new Set(Object.values(FIELDS)));
  }

  changed(names) {
    for (const [id, name] of Object.entries(FIELDS)) if (names.has(name)) byId(id).value = String(state[name]);
    byId("continue").disabled = state.text === "" && !this.busy;
    // What was typed since is not thrown away by writing once more.
    if (names.has("ids") && !this.busy && state.ids?.join() !== this.wrote) this.last = null;
    byId("again").disabled = this.busy || !this.last;
  }

  stop() {
    this.writing?.stop();
  }

  /** The last writing once more, with another seed. */
  again() {
    if (!this.last || this.busy) return;
    set({ seed: state.seed + 1 });
    this.start(this.last);
  }

  /** Goes on after the first `keep` tokens of the text (all of them), with the token `add` put there. */
  async write({ keep = null, add = null }) {
    if (this.busy || !state.a) return;
    try {
      const tokens = await this.tokens();
      const prompt = tokens.slice(0, keep ?? tokens.length);
      if (add) prompt.push(add);
      const forced = Object.fromEntries(Object.entries(state.forced).filter(([slot]) => Number(slot) < prompt.length));
      if (prompt.length) await this.start({ prompt, forced });
    } catch (failure) {
      this.notice(failure);
    }
  }

  async start({ prompt, forced }) {
    const { temperature, seed, most, a } = state;
    const room = this.model.positions ? this.model.positions - prompt.length : most;
    if (room < 1) {
      this.notice(new Error(`The text fills all ${this.model.positions} positions of the model; shorten it to continue.`));
      return;
    }
    this.last = { prompt, forced };
    const writing = new Writing({ model: this.model.name, prompt, rule: a, forced, temperature, seed, most: Math.max(1, Math.min(most, room)), grown: () => this.follow() });
    this.writing = writing;
    this.notice(null);
    this.face();
    set({ forced });
    try {
      await writing.run();
    } catch (failure) {
      writing.reason = "error";
      this.notice(failure);
    }
    this.writing = null;
    this.wrote = writing.kept.map((token) => token.id).join();
    this.pace(writing);
    this.face();
    this.ended(writing);
  }

  /** Draws at most once per frame. */
  follow() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      if (!this.writing) return;
      this.pace(this.writing);
      this.grown(this.writing);
    });
  }

  face() {
    byId("continue").textContent = this.busy ? "Stop" : "Continue";
    byId("continue").classList.toggle("running", this.busy);
    byId("text").readOnly = this.busy;
    byId("again").disabled = this.busy || !this.last;
    document.documentElement.toggleAttribute("data-writing", this.busy);
  }

  pace(writing) {
    const speed = writing.speed === null ? "" : ` · ${figure(writing.speed, 0)} tokens/s`;
    const why = writing.reason && WHY[writing.reason] ? ` · ${WHY[writing.reason]}` : "";
    byId("pace").textContent = `${writing.made} tokens${speed}${why}`;
  }
}
