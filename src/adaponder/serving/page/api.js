// Calls the server's routes. A page without a server has local/api.js in place of this file.

import { Failure } from "./failure.js";

export { Failure };

/** What happens to the visitor's text, for the footer. */
export const PRIVACY = "What you type is sent to this server only";

async function failureOf(response) {
  let message = `The server answered ${response.status}.`;
  try {
    const { error } = await response.json();
    if (typeof error?.message === "string") message = error.message;
  } catch {
    // No JSON: the status is all that is known.
  }
  const { status } = response;
  if (status === 401 || status === 403) message = `${message} Reload the page to sign in.`;
  const busy = status === 429 || status === 503;
  const delay = Number(response.headers.get("retry-after")) || 1;
  const tokens = Number(/^prompt has (\d+) tokens/.exec(message)?.[1]) || null;
  return new Failure(message, { tokens, retryAfter: busy ? Math.max(1, delay) : null });
}

async function call(path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: body === undefined ? {} : { "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached.", { retryAfter: 2 });
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

/** Returns the served model's name and its `adaponder` facts. */
export async function model() {
  const { data } = await (await call("v1/models")).json();
  return { name: data[0].id, ...data[0].adaponder };
}

/** Returns the `/score` answer for a text: depth, loss and more of each token. */
export async function score(body, signal) {
  return (await call("score", body, signal)).json();
}

/** Yields the chunks of a streamed completion. */
export async function* complete(body, signal) {
  const response = await call("v1/completions", { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The connection to the server was lost.");
    }
    if (part.done) return;
    rest += part.value.replace(/\r\n?/g, "\n");
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message);
      yield chunk;
    }
  }
}
