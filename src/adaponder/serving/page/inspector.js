// One token, closely: its gates, what the model expected next after each iteration, and what more depth would gain.

import { gateChart, lossChart } from "./charts.js";
import { h, put } from "./dom.js";
import { wear } from "./palette.js";
import { thresholds } from "./rules.js";
import { figure, percent, spoken, visible } from "./spelling.js";

// Predictions shown after the last iteration, and after each one before it.
const LAST = 5;
const EARLIER = 3;

function heading(token, slot, count, deepest, close) {
  const chip = h("span", { class: "chip" }, visible(token.text, 40));
  wear(chip, token.depth, deepest);
  const reads = token.depth ? `read ${token.depth}× of ${deepest}` : "not read yet";
  return h(
    "header",
    {},
    h("button", { type: "button", class: "close", "aria-label": "Close", onclick: close }, "×"),
    h("h2", {}, chip),
    h("p", { class: "facts" }, `token ${slot + 1} of ${count} · id ${token.id} · `, h("strong", {}, reads)),
  );
}

/** What the model gave a token; of a puzzle only answers can be expected. */
function surprise(token, puzzle) {
  if (token.nll === null || token.nll === undefined || (puzzle && !token.verdict)) return null;
  const odds = `The model gave it ${percentFine(Math.exp(-token.nll))} (${figure(token.nll)} nats).`;
  return h("p", { class: "quiet" }, odds);
}

/** What a token that asks a question is answered. */
function asked({ question }) {
  if (!question) return null;
  const { needed, answer, says } = question;
  const verdict = says === answer ? "right" : `wrong: it is ${answer}`;
  return h("p", { class: "quiet" }, `This question takes ${needed} ${needed === 1 ? "hop" : "hops"}. The model answers ${says}, `, h("strong", {}, verdict), ".");
}

/** How the second rule of a comparison read the same token. */
function second(other, slot, deepest) {
  const token = other?.tokens[slot];
  if (!token) return null;
  const next = other.answers ? null : other.tokens[slot + 1];
  let then = next ? `, and then had a loss of ${figure(next.nll)} nats on the next` : "";
  if (token.question) then = ` and answers ${token.question.says}, ${token.question.says === token.question.answer ? "right" : "wrong"}`;
  return h("p", { class: "quiet" }, `B read it ${token.depth}× of ${deepest}${then}.`);
}

function percentFine(share) {
  if (share >= 0.1) return percent(share);
  return share >= 0.001 ? `${figure(100 * share, 1)} %` : "less than 0.1 %";
}

function gatesOf(token, rule, deepest) {
  if (!token.gates?.length || deepest < 2) return null;
  const limits = thresholds(rule, deepest - 1);
  let note = "This rule does not use the gates.";
  if (limits.length) note = "The token is read again while its gate is at or above τ, the dashed line.";
  else if (rule?.startsWith("budget")) note = "The budget's thresholds decide.";
  return h(
    "section",
    {},
    h("h3", {}, "Gates against τ"),
    gateChart(token.gates, limits, deepest),
    h("p", { class: "quiet" }, note),
  );
}

function guesses(token, next, replace) {
  if (!token.iteration_top?.length) return null;
  const last = token.iteration_top.length - 1;
  const shown = token.iteration_top.map((top, index) => top.slice(0, index === last ? LAST : EARLIER));
  const framed = next && shown.flat().some((guess) => guess.id === next.id);
  const rows = shown.map((top, index) =>
    h(
      "li",
      {},
      h("span", { class: "read" }, `${index + 1}×`),
      h(
        "span",
        { class: "guesses" },
        top.map((guess) => {
          const share = Math.exp(guess.logprob);
          const true_ = next && guess.id === next.id;
          return h(
            "button",
            {
              type: "button",
              class: true_ ? "guess true" : "guess",
              "--share": share,
              "data-id": guess.id,
              "aria-label": `${spoken(guess.text)}, ${percentFine(share)}${true_ ? ", this comes next" : ""}`,
              onclick: () => replace(guess),
            },
            h("span", { class: "word" }, visible(guess.text, 14)),
            h("span", { class: "odds" }, percent(share)),
          );
        }),
      ),
    ),
  );
  return h(
    "section",
    {},
    h("h3", {}, "What comes next? After each read"),
    h("ol", { class: "tops" }, rows),
    h("p", { class: "quiet" }, `${framed ? "The framed one comes next in the text. " : ""}Choose one to write it here and continue.`),
  );
}

function gain(token, next, deepest) {
  const losses = next?.nll_by_iteration;
  if (!losses?.length) return null;
  const full = next.full_nll ?? null;
  let verdict = null;
  if (full !== null) {
    const difference = next.nll - full;
    const much = `${figure(Math.abs(difference))} nats`;
    verdict = `Full depth, all tokens read ${deepest}×, would ${difference >= 0 ? "gain" : "lose"} ${much} here.`;
    if (Math.abs(difference) < 0.005) verdict = `Full depth, all tokens read ${deepest}×, would change nothing here.`;
  }
  return h(
    "section",
    {},
    h("h3", {}, "Loss of the next token, read by read"),
    lossChart(losses, full, deepest),
    verdict && h("p", { class: "verdict" }, verdict),
  );
}

function actions(slot, deepest, halts, forced, { force, goOn }) {
  const depths = Array.from({ length: deepest }, (_, index) => index + 1);
  const button = (depth, label) =>
    h(
      "button",
      { type: "button", "aria-pressed": String((forced ?? 0) === depth), "data-force": depth, onclick: () => force(slot, depth) },
      label,
    );
  return h(
    "section",
    { class: "actions" },
    halts && h("div", { class: "segments", role: "group", "aria-label": "Depth of this token" }, button(0, "By rule"), ...depths.map((depth) => button(depth, `${depth}×`))),
    h("button", { type: "button", class: "plain", id: "go-on", onclick: () => goOn(slot) }, "Continue from here"),
  );
}

/** Draws the inspector of one slot of a reading; `hands` are the actions `force`, `goOn` and `replace`. */
export function inspect(element, { reading, other, slot, deepest, halts, rule, forced, hands }) {
  const token = reading?.tokens[slot];
  element.classList.toggle("idle", !token);
  if (!token) {
    put(
      element,
      h("div", { class: "empty" }, h("h2", {}, "Look at a token"), h("p", {}, "Point at one, or move the caret: its gates, predictions and losses appear here.")),
    );
    return;
  }
  const next = reading.tokens[slot + 1];
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.force : undefined;
  put(
    element,
    heading(token, slot, reading.tokens.length, deepest, hands.close),
    token.unknown && h("p", { class: "quiet" }, "The tokenizer does not know this word: the model reads one token for all unknown words."),
    surprise(token, reading.answers),
    asked(token),
    second(other?.tokens.length === reading.tokens.length ? other : null, slot, deepest),
    actions(slot, deepest, halts, forced[slot], hands),
    guesses(token, next, (guess) => hands.replace(slot, guess)),
    gatesOf(token, rule, deepest),
    reading.answers && !token.question ? null : gain(token, next, deepest),
    token.iteration_top ? null : h("p", { class: "quiet later" }, "Predictions and full depth follow when the text rests."),
  );
  if (focused !== undefined) element.querySelector(`[data-force="${focused}"]`)?.focus();
}
