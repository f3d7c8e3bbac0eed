// The connection to the agent: server-sent events over fetch, since an EventSource cannot send the token.

// Nothing for so long (the agent sends something every 10 s): the connection is dead although nobody has said so.
const SILENT_MS = 25_000;
const MOST_WAIT_MS = 5000;

const without = () => Object.create(null);  // names come from outside: one may be "__proto__"

/** The document once it is patched: JSON Merge Patch, RFC 7396. */
export function patched(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = target !== null && typeof target === "object" && !Array.isArray(target)
    ? Object.assign(without(), target) : without();
  for (const name of Object.keys(patch)) {
    if (patch[name] === null) delete result[name];
    else result[name] = patched(result[name], patch[name]);
  }
  return result;
}

export class Stream {
  /**
   * token() gives the token or ""; onDocument(document) is called with every picture; onState(state, text) with
   * "connecting", "live", "lost", "ended" or "token".
   */
  constructor({ token, onDocument, onState }) {
    Object.assign(this, { token, onDocument, onState });
    this.waits = 0;
    this.isWoken = false;
    this.endPause = () => {};
  }

  /** Connect at once: now, or when the attempt that is on its way has failed (it may have had the old token). */
  wake() {
    this.isWoken = true;
    this.endPause();
  }

  headers() {
    const token = this.token();
    return token ? { Authorization: `Bearer ${token}` } : {};
  }

  /** For ever: connect, read, and connect again. */
  async run() {
    for (;;) {
      let why = "the agent has closed the connection", state = "lost";
      this.isWoken = false;
      try {
        const answer = await this.read();
        if (answer) [state, why] = answer;
      } catch (error) {
        why = error.name === "AbortError" ? "nothing has come for 25 s" : "the agent does not answer";
      }
      const pauseMs = Math.min(MOST_WAIT_MS, 500 * 2 ** this.waits++);
      if (this.isWoken) continue;
      this.onState(state, why);
      await new Promise((done) => { this.endPause = done; setTimeout(done, state === "token" ? 1e9 : pauseMs); });
    }
  }

  /** Read one stream to its end; [state, text] where it gives the state. */
  async read() {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const response = await fetch("events", { headers: this.headers(), signal: abort.signal, cache: "no-store" });
      if (response.status === 401) return ["token", "a token is wanted"];
      if (!response.ok) return ["lost", (await response.text()).trim() || `status ${response.status}`];
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "", whole = null;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return null;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENT_MS);
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const message = parsed(part);
          if (message.name === "end") return ["ended", "the agent of this host has ended"];
          if (message.name !== "whole" && message.name !== "change") continue;
          whole = patched(message.name === "whole" ? null : whole, JSON.parse(message.data));
          this.waits = 0;
          this.onState("live", "live");
          this.onDocument(whole);
        }
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }
}

function parsed(text) {
  const message = { name: "", data: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) message.name = line.slice(7);
    if (line.startsWith("data: ")) message.data += line.slice(6);
  }
  return message;
}
