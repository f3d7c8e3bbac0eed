// Rounds, failures, saves and outages of etcd over time: of the events that are known here.

import { clock, duration, number, svg } from "./draw.js";

const MOST_EVENTS = 2000;
const LEFT = 74, RIGHT = 10, LANE = 26;
const LANES = ["rounds", "failures", "saves", "other", "etcd"];

/** All events that this page has seen, also those that their hosts no longer report. */
export class Events {
  constructor() { this.known = new Map(); this.before = new Set(); }

  take(events) {
    // the line of a moment grows while more workers report it: the shorter one goes
    const gone = [...this.before].filter((key) => !(key in events));
    const oldest = Math.min(...Object.values(events).map((event) => event.at_s));
    for (const key of gone) if (this.known.get(key)?.at_s >= oldest) this.known.delete(key);
    for (const [key, event] of Object.entries(events)) this.known.set(key, event);
    this.before = new Set(Object.keys(events));
    while (this.known.size > MOST_EVENTS) this.known.delete(this.known.keys().next().value);
  }

  all() { return [...this.known.values()].sort((one, other) => one.at_s - other.at_s); }
}

/** [{number, world, from, until}] of what events report, and of the present round. */
export function rounds(events, run) {
  const found = new Map();
  for (const event of events) {
    if (event.round < 0 || !["join", "re_form"].includes(event.kind)) continue;
    const round = found.get(event.round) ?? { number: event.round, from: event.at_s, world: 0 };
    round.from = Math.min(round.from, event.at_s);
    round.world = event.world_size || round.world;
    found.set(event.round, round);
  }
  const now = run.round;
  if (now.state === "running") {
    const round = found.get(now.number) ?? { number: now.number, from: now.since_s || run.at_s };
    found.set(now.number, { ...round, world: run.world_size });
  }
  const sorted = [...found.values()].sort((one, other) => one.number - other.number);
  sorted.forEach((round, n) => { round.until = sorted[n + 1]?.from ?? (round.number === now.number || now.state !== "closed" ? run.at_s : now.since_s || run.at_s); });
  return sorted;
}

function outages(events, run) {
  const found = [], open = new Map();
  for (const event of events.filter((one) => one.kind === "store_outage")) {
    if (event.grade) { open.set(event.host, event.at_s); continue; }
    found.push({ from: open.get(event.host) ?? event.at_s, until: event.at_s, text: `${event.host}: ${event.text}` });
    open.delete(event.host);
  }
  for (const [host, from] of open) found.push({ from, until: run.at_s, text: `${host}: etcd is away` });
  return found;
}

/** Draw it into `node`; `windowS` 0: all that is known. */
export function drawTimeline(node, events, run, windowS) {
  const width = Math.max(360, node.clientWidth), until = run.at_s;
  const began = Math.min(...Object.values(run.hosts).map((host) => host.began_s || until), events[0]?.at_s ?? until, until - 10);
  const from = windowS ? until - windowS : began;
  const x = (at) => LEFT + ((width - LEFT - RIGHT) * (Math.max(from, Math.min(until, at)) - from)) / (until - from);
  const shown = events.filter((event) => event.at_s >= from);
  const all = rounds(events, run).filter((round) => round.until >= from);
  const bad = shown.filter((event) => event.grade === "bad" && event.kind !== "store_outage");
  const saves = shown.filter((event) => event.kind === "save");
  const others = shown.filter((event) => event.grade === "warning" || ["drain", "restore"].includes(event.kind));
  const away = outages(events, run).filter((one) => one.until >= from);
  const lanes = LANES.filter((lane) => lane !== "etcd" || away.length).filter((lane) => lane !== "other" || others.length);
  const middle = Object.fromEntries(lanes.map((lane, n) => [lane, LANE * n + LANE / 2 + 2]));
  const height = LANE * lanes.length + 24;
  const text = `${all.length} rounds, ${bad.length} failures and losses, ${saves.length} saves in ${duration(until - from)}; each is in the list of events`;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": text });
  for (const lane of lanes) {
    chart.append(svg("text", { x: 0, y: middle[lane] + 4 }, lane));
    chart.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: middle[lane], y2: middle[lane] }));
  }
  drawAxis(chart, from, until, x, width, height);
  all.forEach((round, n) => chart.append(drawRound(round, n, x, middle.rounds)));
  for (const event of bad) chart.append(mark(event, "path", { class: "bad", d: cross(x(event.at_s), middle.failures) }));
  for (const event of saves) chart.append(mark(event, "circle", { class: "save", cx: x(event.at_s), cy: middle.saves, r: 4 }));
  for (const event of others) chart.append(mark(event, "circle", { class: "other", cx: x(event.at_s), cy: middle.other, r: 3.5 }));
  for (const one of away) {
    const region = { class: "outage", x: x(one.from), y: middle.etcd - 6, width: Math.max(3, x(one.until) - x(one.from)), height: 12, rx: 3 };
    chart.append(svg("rect", region, svg("title", {}, one.text)));
  }
  node.replaceChildren(chart);
}

function drawRound(round, n, x, y) {
  const [left, right] = [x(round.from), x(round.until)];
  const title = `round ${round.number}: ${round.world || "?"} workers, ${duration(Math.max(0, round.until - round.from))}`;
  const group = svg("g", {}, svg("title", {}, title));
  const region = { class: n % 2 ? "round odd" : "round", x: left, y: y - 9, width: Math.max(2, right - left), height: 18, rx: 3 };
  group.append(svg("rect", region));
  const label = [`round ${round.number} · ${round.world} workers`, `${round.number}: ${round.world}`].find((one) => one.length * 6.6 < right - left - 8);
  if (label) group.append(svg("text", { class: "round-text", x: left + 6, y: y + 4 }, label));
  return group;
}

function drawAxis(chart, from, until, x, width, height) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400];
  const step = steps.find((one) => (until - from) / one <= Math.max(2, width / 130)) ?? 172_800;
  for (let at = Math.ceil(from / step) * step; at < until; at += step) {
    if (x(at) > width - RIGHT - 24 || x(at) < LEFT + 20) continue;
    chart.append(svg("text", { x: x(at), y: height - 6, "text-anchor": "middle" }, clock(at)));
  }
}

const cross = (x, y) => `M${x - 4} ${y - 4}L${x + 4} ${y + 4}M${x + 4} ${y - 4}L${x - 4} ${y + 4}`;

function mark(event, tag, attributes) {
  const who = event.worker || event.host, rank = event.rank >= 0 ? ` (rank ${number(event.rank)})` : "";
  return svg(tag, attributes, svg("title", {}, `${clock(event.at_s)} ${who}${rank}: ${event.text}`));
}
