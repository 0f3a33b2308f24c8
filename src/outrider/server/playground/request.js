// Talking to the server: the key, one streamed request, and what went wrong in words.

const KEY = "outrider-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// What a user is told. `status` 0: there was no answer at all.
export class Problem extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers() {
  const sent = { "Content-Type": "application/json" };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  return sent;
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    said = response.statusText;
  }
  const wait = Number(response.headers.get("Retry-After")) || null;
  const known = {
    401: "The server asks for an API key.",
    429: "The server is busy: too many requests are waiting.",
    503: "The server is shutting down, or not ready.",
  };
  return new Problem(response.status, known[response.status] ?? `${said} (${response.status})`, wait);
}

export async function modelCard() {
  return (await (await ask("v1/models")).json()).data[0];
}

// Yields lists of chunks, as they come in together. Ends when the server says so, and throws where it does not.
export async function* chunks(body, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0, "The connection broke before the answer ended.");
    }
    if (read.done) throw new Problem(0, "The connection ended before the answer did.");
    const all = (rest + read.value).split("\n"); // an event is one line here; others are empty, or comments
    rest = all.pop();
    const lines = all.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
    const ended = lines.indexOf("[DONE]");
    const found = (ended < 0 ? lines : lines.slice(0, ended)).map((line) => JSON.parse(line));
    const failed = found.findIndex((chunk) => chunk.error);
    if (failed !== 0 && found.length) yield failed < 0 ? found : found.slice(0, failed);
    if (failed >= 0) throw new Problem(found[failed].error.code === "deadline_exceeded" ? 504 : 500, found[failed].error.message);
    if (ended >= 0) return;
  }
}
