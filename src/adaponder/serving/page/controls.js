// The row of controls for generating text: continue or stop, retry, and the sampling settings.

import { byId } from "./dom.js";
import { Generation } from "./generate.js";
import { figure } from "./spelling.js";
import { set, state } from "./state.js";

// Number inputs; these ids are also the names of their fields in the state.
const FIELDS = ["most", "temperature", "seed"];
const ENDINGS = { length: "", stop: "end of text", stopped: "stopped", cancelled: "stopped", error: "failed" };

export class Controls {
  /** `tokens()` resolves to the tokens of the text; `onProgress` and `onEnd` receive the `Generation`. */
  constructor({ notice, onProgress, onEnd, tokens }) {
    Object.assign(this, { notice, onProgress, onEnd, tokens, generation: null, last: null, lastIds: null, model: null });
    byId("continue").addEventListener("click", () => (this.busy ? this.stop() : this.generate({})));
    byId("again").addEventListener("click", () => this.retry());
    for (const name of FIELDS) {
      byId(name).addEventListener("change", () => {
        const value = byId(name).valueAsNumber;
        if (Number.isFinite(value) && value >= 0) set({ [name]: name === "temperature" ? value : Math.round(value) });
        byId(name).value = String(state[name]);
      });
    }
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) {
        event.preventDefault();
        this.generate({});
      }
      if (event.key === "Escape" && this.busy) this.stop();
    });
  }

  get busy() {
    return this.generation !== null;
  }

  open(model) {
    this.model = model;
    this.changed(new Set(FIELDS));
  }

  changed(names) {
    for (const name of FIELDS) if (names.has(name)) byId(name).value = String(state[name]);
    byId("continue").disabled = state.text === "" && !this.busy;
    // A retry would discard what was typed after the last generation.
    if (names.has("ids") && !this.busy && state.ids?.join() !== this.lastIds) this.last = null;
    byId("again").disabled = this.busy || !this.last;
  }

  stop() {
    this.generation?.stop();
  }

  /** Repeats the last generation with the next seed. */
  retry() {
    if (!this.last || this.busy) return;
    set({ seed: state.seed + 1 });
    this.start(this.last);
  }

  /** Continues the first `keep` tokens of the text (default: all), followed by the token `add`. */
  async generate({ keep = null, add = null }) {
    if (this.busy || !state.a) return;
    try {
      const tokens = await this.tokens();
      if (this.busy) return;
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
    const maxTokens = Math.max(1, Math.min(most, room));
    const onProgress = () => this.scheduleDraw();
    const generation = new Generation({ model: this.model.name, prompt, rule: a, forced, temperature, seed, maxTokens, onProgress });
    this.generation = generation;
    this.notice(null);
    this.draw();
    set({ forced });
    try {
      await generation.run();
    } catch (failure) {
      generation.finishReason = "error";
      this.notice(failure);
    }
    this.generation = null;
    this.lastIds = generation.textTokens.map((token) => token.id).join();
    this.drawPace(generation);
    this.draw();
    this.onEnd(generation);
  }

  /** Draws progress at most once per frame. */
  scheduleDraw() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      if (!this.generation) return;
      this.drawPace(this.generation);
      this.onProgress(this.generation);
    });
  }

  draw() {
    byId("continue").textContent = this.busy ? "Stop" : "Continue";
    byId("continue").classList.toggle("running", this.busy);
    byId("text").readOnly = this.busy;
    byId("again").disabled = this.busy || !this.last;
    document.documentElement.toggleAttribute("data-writing", this.busy);
  }

  drawPace({ count, speed, finishReason }) {
    const rate = speed === null ? "" : ` · ${figure(speed, 0)} tokens/s`;
    const ending = ENDINGS[finishReason] ? ` · ${ENDINGS[finishReason]}` : "";
    byId("pace").textContent = `${count} ${count === 1 ? "token" : "tokens"}${rate}${ending}`;
  }
}
