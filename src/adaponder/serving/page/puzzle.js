// Puzzles whose answers follow from their text. Hops: steps `x y .`, then `|`, then questions `x y`, where y is the end of
// the chain of steps that starts at x.

/** The questions of a hops puzzle, `{slot, needed, answer}`: where the answer stands or would stand, hops, right word. */
function questions(words) {
  const bar = words.indexOf("|");
  const found = [];
  const leads = new Map();
  for (let place = 0; place + 2 < bar; place += 3) if (words[place + 2] === ".") leads.set(words[place], words[place + 1]);
  for (let slot = bar + 2; bar > 0 && slot <= words.length; slot += 2) {
    let [word, needed] = [words[slot - 1], 0];
    while (leads.has(word) && needed < leads.size) [word, needed] = [leads.get(word), needed + 1];
    if (needed && !leads.has(word)) found.push({ slot, needed, answer: word });
  }
  return found;
}

/** Marks unknown words of a reading and, for a model of puzzles, right and wrong answers; returns the reading. */
export function marked(reading, model) {
  for (const token of reading.tokens) if (token.id === model.unknown) token.unknown = true;
  if (model.examples?.answers === "hops") judge(reading);
  return reading;
}

/**
 * Marks what a reading answers: the token of an answer gets a `verdict`, the token that asks a `question`, the reading
 * `answers` with how many are right and their mean loss.
 */
function judge(reading) {
  const { tokens } = reading;
  const losses = [];
  let [right, count] = [0, 0];
  for (const { slot, needed, answer } of questions(tokens.map((token) => token.text.trim()))) {
    const says = tokens[slot - 1].iteration_top?.at(-1)[0].text.trim();
    if (says === undefined) continue;
    tokens[slot - 1].question = { needed, answer, says };
    count += 1;
    if (says === answer) right += 1;
    if (!tokens[slot]) continue;
    tokens[slot].verdict = says === answer ? "right" : "wrong";
    losses.push(tokens[slot].nll);
  }
  if (count) reading.answers = { right, count, loss: losses.length ? losses.reduce((a, b) => a + b) / losses.length : null };
}
