// The log panel: the last lines of one worker of this host, asked for while the panel can be seen.

import { byId, el, keyed, setText } from "./draw.js";

const EVERY_MS = 3000;
const LINES = 300;
// colours and cursor movements of terminals
const ESCAPES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;

/** Lines as a terminal would leave them: what a progress bar has overwritten is gone. */
export const readable = (text) => text.replace(ESCAPES, "").split("\n").map((line) => line.replace(/\r+$/, "").split("\r").at(-1)).join("\n");

export class LogPanel {
  /** headers() gives those that the agent wants. */
  constructor(headers) {
    this.headers = headers;
    this.version = "";
    this.node = byId("log");
    this.choice = byId("log-name");
    this.choice.addEventListener("change", () => { this.version = ""; this.ask(); });
    setInterval(() => this.ask(), EVERY_MS);
  }

  draw(run) {
    const names = run.page.logs;
    keyed(this.choice, names, (name) => name, (name) => el("option", { value: name }), (option, name) => {
      const [place, restarts] = name.split(".");
      const alive = Object.values(run.workers).find((one) => one.host === run.page.host && one.worker.endsWith(`/${name}`));
      const life = Number(restarts) ? `, life ${Number(restarts) + 1}` : "";
      setText(option, `worker ${place}${life}${alive ? alive.rank >= 0 ? ` (rank ${alive.rank})` : "" : " (ended)"}`);
    });
    this.choice.disabled = !names.length;
    if (!names.length) setText(this.node, "No logs are kept: start the run with --log-dir DIR to see them here.");
    else if (!this.version) this.ask();
  }

  async ask() {
    if (document.hidden || this.choice.disabled || !this.choice.value || this.asking) return;
    const name = this.choice.value;
    this.asking = true;
    try {
      const headers = { ...this.headers(), ...(this.version ? { "If-None-Match": this.version } : {}) };
      const response = await fetch(`log/${encodeURIComponent(name)}?tail=${LINES}`, { headers, cache: "no-store" });
      if (response.status === 304 || this.choice.value !== name) return;
      if (response.ok) {
        this.version = response.headers.get("ETag") ?? "";
        setText(this.node, readable(await response.text()));
        if (byId("log-follow").checked) this.node.scrollTop = this.node.scrollHeight;
      } else setText(this.node, await response.text());
    } catch { /* the head of the page says that the agent does not answer */ } finally { this.asking = false; }
  }
}
