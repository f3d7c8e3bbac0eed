// The live page of a run.

import { byId, duration, setAttribute, setText } from "./draw.js";
import { drawEvents, drawHead, drawHosts, drawLedger, drawNotes, drawTiles, drawWorkers, History, published } from "./sections.js";
import { Stream } from "./stream.js";
import { drawTimeline, Events } from "./timeline.js";

const TOKEN = "torchelastic-token", THEME = "torchelastic-theme";
const history = new History(), events = new Events();
let run = null, receivedMs = 0, link = { state: "connecting", text: "connecting" };

// --- the token: in the address once, then only in this tab's memory -----------------------------------------------------

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  sessionStorage.setItem(TOKEN, given);
  window.history.replaceState(null, "", location.pathname);
}

takeToken();
window.addEventListener("hashchange", () => { takeToken(); stream.wake(); });
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value.trim());
  byId("token").value = "";
  stream.wake();
});

// --- pictures ---------------------------------------------------------------------------------------------------------

function take(whole) {
  run = whole;
  receivedMs = performance.now();
  events.take(run.events);
  history.take("steps_per_s", run.at_s, run.steps_per_s);
  for (const [name, value] of published(run)) history.take(`value ${name}`, run.at_s, value);
  byId("main").hidden = false;
  if (!document.hidden) draw();
}

function draw() {
  if (!run) return;
  const all = events.all();
  drawHead(run);
  drawNotes(run);
  drawTiles(run, history);
  drawTimeline(byId("timeline"), all, run, Number(byId("window").value));
  drawLedger(run);
  drawWorkers(run);
  drawEvents(all);
  drawHosts(run);
}

function drawLink() {
  const isOld = Boolean(run) && link.state !== "live" && link.state !== "connecting";
  const age = isOld ? `, this is how it was ${duration(Math.max(1, Math.round((performance.now() - receivedMs) / 1000)))} ago` : "";
  const words = { live: "live", connecting: "connecting", ended: link.text + age, token: "a token is wanted" };
  const text = words[link.state] ?? `disconnected: ${link.text}${age}; trying again`;
  setText(byId("link"), text);
  setAttribute(byId("link"), "data-state", link.state);
  byId("main").classList.toggle("old", isOld);
  byId("ask").hidden = link.state !== "token";
}

const stream = new Stream({
  token: () => sessionStorage.getItem(TOKEN) ?? "",
  onDocument: take,
  onState: (state, text) => { link = { state, text }; drawLink(); },
});

setInterval(drawLink, 1000);
byId("window").addEventListener("change", draw);
byId("with-saves").addEventListener("change", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
new ResizeObserver(() => run && drawTimeline(byId("timeline"), events.all(), run, Number(byId("window").value))).observe(byId("timeline"));

// --- light and dark ---------------------------------------------------------------------------------------------------

const THEMES = { auto: "as the system has them", light: "light", dark: "dark" };

function showTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  setText(byId("theme"), name[0].toUpperCase() + name.slice(1));
  setAttribute(byId("theme"), "aria-label", `Colours: ${THEMES[name]}`);
}

let theme = localStorage.getItem(THEME) in THEMES ? localStorage.getItem(THEME) : "auto";
showTheme(theme);
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  localStorage.setItem(THEME, theme);
  showTheme(theme);
});

stream.run();
