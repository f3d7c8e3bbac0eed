// What the page shows of a run, section by section. Every function takes the document and draws it anew in place.

import { ACCOUNTS } from "./accounts.js";
import { FIGURES } from "./figures.js";
import { bar, byId, clock, duration, el, isAccount, keyed, number, percent, setAttribute, setText, spark } from "./draw.js";

const MOST_POINTS = 900;

/** Rates and published values since this page was opened. */
export class History {
  constructor() { this.lines = new Map(); }

  take(name, atS, value) {
    if (!Number.isFinite(value)) return;
    const line = this.lines.get(name) ?? [];
    line.push([atS, value]);
    // every second of the older points goes: the shape stays, for days
    this.lines.set(name, line.length > MOST_POINTS ? line.filter((_, n) => n % 2 || n > MOST_POINTS / 2) : line);
  }

  of(name) { return this.lines.get(name) ?? []; }
}

/** What was published, by the worker with the lowest rank that has. */
export function published(run) {
  const found = new Map();
  for (const worker of workersOf(run)) {
    for (const name of Object.keys(worker.values ?? {})) if (!found.has(name)) found.set(name, worker.values[name]);
  }
  return found;
}

export const workersOf = (run) =>
  Object.values(run.workers).sort((one, other) => (one.rank < 0) - (other.rank < 0) || one.rank - other.rank || (one.worker < other.worker ? -1 : 1));

export function drawHead(run) {
  const state = run.round.state;
  setText(byId("run"), run.run_id);
  const title = `${run.run_id} · torchelastic`;
  if (document.title !== title) document.title = title;
  const badge = byId("state");
  badge.hidden = false;
  setText(badge, { open: "waiting for workers", gathering: "gathering", running: "running", closed: "finished" }[state] ?? state);
  setAttribute(badge, "data-state", state);
  setText(byId("footer"), `torchelastic ${run.page.version} · served by the agent of ${run.page.host} · clock times are this browser's`);
}

export function drawNotes(run) {
  const notes = [...run.notes];
  if (run.page.etcd_away_s) {
    const others = Object.keys({ ...run.hosts, ...run.silent }).length > 1 ? ", what is shown of other hosts is as old" : "";
    notes.unshift({ grade: "warning", text: `etcd does not answer since ${clock(run.page.etcd_away_s)}: training goes on${others}` });
  }
  keyed(byId("notes"), notes.map((note, n) => ({ ...note, key: `${n} ${note.grade}` })), (note) => note.key,
    (note) => el("p", { class: "note", "data-grade": note.grade }), (node, note) => setText(node, note.text));
}

export function drawTiles(run, history) {
  setText(byId("because"), run.round.because);
  const since = run.round.since_s ? ` for ${duration(Math.max(0, run.at_s - run.round.since_s))}` : "";
  const goodput = run.figures.goodput;
  const tiles = [
    { name: "World size", value: number(run.world_size), more: `${run.round.number < 0 ? "no round yet" : `round ${run.round.number}`}${since}` },
    { name: "Step", value: run.step < 0 ? "–" : number(run.step), more: run.steps_per_s ? `${duration(1 / run.steps_per_s)} per step` : "" },
    { name: "Steps per second", value: number(run.steps_per_s, 3), line: "steps_per_s" },
  ];
  for (const [name, value] of [...published(run)].slice(0, 3)) tiles.push({ name, value: number(value), line: `value ${name}` });
  const bound = goodput.attainable === undefined ? "" : `attainable ${percent(goodput.attainable)}`;
  tiles.push({ name: "Goodput", value: percent(goodput.value), more: bound });
  const costs = `on these hosts ${number(run.seen.lost)} workers lost, ${number(run.seen.undone)} attempts undone`;
  tiles.push({ name: "Failures", value: number(run.seen.failures), more: costs });
  keyed(byId("tiles"), tiles, (tile) => tile.line ?? tile.name,
    (tile) => el("div", { class: "tile" }, el("dt", {}, tile.name), el("dd"), el("dd", { class: "quiet" })),
    (node, tile) => {
      setText(node.children[1], tile.value);
      if (!tile.line) return setText(node.children[2], tile.more);
      const points = history.of(tile.line);
      node.children[2].replaceChildren(spark(points));
      setAttribute(node, "title", points.length > 1 ? `since ${clock(points[0][0])}, when this page was opened` : "");
    });
}

export function drawLedger(run) {
  const node = byId("ledger");
  if (!node.firstElementChild) node.append(el("div", { class: "bar" }), el("ul", { class: "keys" }));
  const amounts = run.seen.amounts_ns, total = bar(node.firstElementChild, amounts);
  const shown = ACCOUNTS.filter((label) => amounts[label] > 0);
  keyed(node.lastElementChild, shown, (label) => label,
    (label) => el("li", {}, el("span", { class: `swatch a-${label}`, "aria-hidden": "true" }), el("span")),
    (item, label) => setText(item.lastElementChild, `${label} ${percent(amounts[label] / total)} · ${duration(amounts[label] / 1e9)}`));
  setText(byId("ledger-sum"), `${duration(total / 1e9)} of ${number(run.seen.workers)} workers' time, in ${duration(run.seen.wall_ns / 1e9)}`);
  const names = Object.keys(FIGURES).filter((name) => run.figures[name] && !name.endsWith("_s"));
  keyed(byId("figures"), names, (name) => name, makeFigure, (figure, name) => updateFigure(figure, run.figures[name]));
}

function makeFigure(name) {
  const head = el("div", {}, el("b"), el("span", { class: "quiet" }));
  const why = el("details", {}, el("summary", { class: "quiet" }, "why"), el("p", { class: "quiet" }));
  return el("div", { class: "figure" }, el("div", {}, FIGURES[name]), head, el("div", { class: "gauge", "aria-hidden": "true" }, el("i"), el("u")), why);
}

function updateFigure(node, figure) {
  const [, head, gauge, why] = node.children;
  setText(head.children[0], percent(figure.value ?? 0));
  setText(head.children[1], figure.attainable === undefined ? "" : ` of ${percent(figure.attainable)} attainable`);
  gauge.firstElementChild.style.width = `${Math.min(100, 100 * (figure.value ?? 0))}%`;
  gauge.lastElementChild.style.left = `calc(${Math.min(100, 100 * (figure.attainable ?? 1))}% - 1px)`;
  setText(why.lastElementChild, figure.because);
}

// --- tables ------------------------------------------------------------------------------------------------------------

function table(node, caption, columns, rows, keyOf, classOf) {
  if (!node.tHead) {
    const heads = columns.map(([name, , kind]) => el("th", { scope: "col", class: kind ?? "" }, name));
    node.append(el("caption", {}, caption), el("thead", {}, el("tr", {}, ...heads)), el("tbody"));
  }
  const make = () => el("tr", {}, ...columns.map(([, , kind]) => el("td", { class: kind ?? "" })));
  keyed(node.tBodies[0], rows, keyOf, make, (row, item) => {
    setAttribute(row, "class", classOf(item));
    columns.forEach(([, value], n) => {
      const shown = value(item, row.cells[n]);
      if (shown !== undefined) { setText(row.cells[n], shown); setAttribute(row.cells[n], "title", String(shown).length > 30 ? shown : ""); }
    });
  });
}

function drawNow(cell, worker) {
  if (!cell.firstElementChild) cell.append(el("span", { class: "swatch", "aria-hidden": "true" }), el("span"));
  const account = isAccount(worker.account) ? worker.account : "idle";
  setAttribute(cell.firstElementChild, "class", `swatch a-${account}`);
  setText(cell.lastElementChild, worker.account);
}

function drawAmounts(cell, worker) {
  if (!cell.firstElementChild) cell.append(el("div", { class: "bar small" }));
  bar(cell.firstElementChild, worker.amounts_ns);
}

export function drawWorkers(run) {
  const workers = workersOf(run);
  const name = published(run).has("loss") ? "loss" : undefined;
  const columns = [
    ["rank", (one) => (one.rank < 0 ? "–" : one.rank), "number"],
    ["host", (one) => one.host],
    ["step", (one) => (one.step === undefined || one.step < 0 ? "" : number(one.step)), "number"],
    ["steps/s", (one) => (one.outside ? "" : number(one.steps_per_s, 3)), "number"],
    ["loss", (one) => number(one.values?.[name ?? "loss"]), "number"],
    ["now", (one, cell) => (one.outside ? "known to etcd only" : drawNow(cell, one))],
    ["where its time went", (one, cell) => (one.outside ? "" : drawAmounts(cell, one))],
    ["restarts", (one) => one.restarts ?? "", "number"],
    ["pid", (one) => one.pid || "", "number"],
    ["up for", (one) => (one.began_s ? duration(Math.max(0, run.at_s - one.began_s)) : ""), "number"],
    ["worker", (one) => one.worker],
  ];
  const ranks = new Set(workers.map((worker) => worker.rank));
  const outside = Object.values(run.members).filter((member) => member.rank >= 0 && !ranks.has(member.rank))
    .map((member) => ({ worker: member.member_id, host: member.host, rank: member.rank, outside: true }));
  const rows = [...workers, ...outside].sort((one, other) => (one.rank < 0) - (other.rank < 0) || one.rank - other.rank);
  table(byId("workers-table"), "Workers by rank", columns, rows, (one) => (one.outside ? "member " : "worker ") + one.worker,
    (one) => (one.outside ? "outside" : ""));
  const spares = workers.filter((worker) => worker.rank < 0).length;
  const leaving = Object.values(run.members).filter((member) => member.is_leaving).length;
  const parts = [`${Object.keys(run.members).length} members`, spares && `${spares} without a rank`, leaving && `${leaving} leaving`,
    run.round.waiting && `${run.round.waiting} waiting`];
  setText(byId("workers-sum"), parts.filter(Boolean).join(" · "));
}

export function drawHosts(run) {
  const hosts = [...Object.values(run.silent).map((host) => ({ ...host, isSilent: true })), ...Object.values(run.hosts)];
  const workers = Object.values(run.workers);
  const columns = [
    ["host", (one) => one.host],
    ["reported", (one) => (one.at_s ? `${duration(Math.max(0, Math.round(run.at_s - one.at_s)))} ago` : "nothing yet")],
    ["workers", (one) => workers.filter((worker) => worker.worker.startsWith(`${one.host}-${one.incarnation}/`)).length, "number"],
    ["etcd", (one) => (one.isSilent ? "silent" : one.is_etcd_away ? "away" : "in sight")],
    ["page", (one) => one.address],
    ["version", (one) => one.version],
    ["agent", (one) => one.incarnation],
    ["ledger and logs", (one) => one.journal],
  ];
  table(byId("hosts-table"), "Hosts", columns, hosts, (one) => `${one.host}/${one.incarnation}`, (one) => (one.isSilent ? "silent" : ""));
}

export function drawEvents(events) {
  const withSaves = byId("with-saves").checked;
  const newest = events.filter((event) => withSaves || event.kind !== "save").slice(-150).reverse();
  const keyOf = (event) => `${event.at_s} ${event.host} ${event.kind} ${event.worker}`;
  byId("no-events").hidden = newest.length > 0;
  keyed(byId("events"), [...new Map(newest.map((event) => [keyOf(event), event])).values()], keyOf,
    (event) => el("li", { "data-kind": event.kind === "save" ? "save" : event.grade },
      el("time", { datetime: new Date(1000 * event.at_s).toISOString() }, clock(event.at_s)),
      el("span", {}, el("span", { class: "who" }), " ", el("span", { class: "what" }))),
    (node, event) => {
      const who = event.rank >= 0 ? `rank ${event.rank} (${event.worker})` : event.worker || event.host;
      setText(node.lastElementChild.children[0], who);
      setText(node.lastElementChild.children[1], event.text);
    });
}
