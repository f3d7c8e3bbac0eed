// Elements and numbers. Whatever comes from outside is text: nothing here, or anywhere, is parsed as HTML.

import { ACCOUNTS } from "./accounts.js";

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);  // strings become text nodes
  return node;
}

export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Change a text only if it is another one, so that selections and screen readers are left alone. */
export function setText(node, text) {
  const wanted = text === undefined || text === null ? "" : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Make `parent` hold one child per item, in order, keeping those that are there. */
export function keyed(parent, items, keyOf, make, update) {
  const present = parent.keyedChildren ?? (parent.keyedChildren = new Map());
  const keys = new Set(items.map(keyOf));
  for (const [key, node] of present) if (!keys.has(key)) { node.remove(); present.delete(key); }
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = present.get(key);
    if (!node) present.set(key, node = make(item));
    if (node === before) before = before.nextElementSibling;
    else parent.insertBefore(node, before);
    update(node, item);
  }
}

export function number(value, digits = 4) {
  if (value === undefined || value === null || Number.isNaN(value)) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

/** Less than all never looks like all, and more than nothing not like nothing; as `percent` of torchelastic.text. */
export function percent(share) {
  if (share === 0 || share === 1) return `${100 * share} %`;
  return share > 0 && share < 5e-4 ? "< 0.1 %" : share >= 0.9995 && share < 1 ? "> 99.9 %" : `${(100 * share).toFixed(1)} %`;
}

export function duration(seconds) {
  if (seconds !== 0 && seconds < 0.95) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${seconds < 10 && !Number.isInteger(seconds) ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds < 172_800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86_400).toFixed(1)} d`;
}

export function clock(atS) {
  const at = new Date(1000 * atS);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

export const isAccount = (label) => ACCOUNTS.includes(label);

/** A bar of accounts: amounts by label. */
export function bar(node, amounts) {
  const total = ACCOUNTS.reduce((sum, label) => sum + (amounts?.[label] ?? 0), 0);
  keyed(node, ACCOUNTS, (label) => label, (label) => el("i", { class: `a-${label}` }), (part, label) => {
    part.style.width = total ? `${(100 * (amounts[label] ?? 0)) / total}%` : "0";
  });
  const shown = ACCOUNTS.filter((label) => total && amounts[label] / total >= 5e-4);
  const text = shown.map((label) => `${label} ${percent(amounts[label] / total)}`).join(", ");
  setAttribute(node, "role", "img");
  setAttribute(node, "aria-label", text || "nothing yet");
  setAttribute(node, "title", text);
  return total;
}

/** A line of [when, value], without axes: the shape. */
export function spark(points) {
  const chart = svg("svg", { class: "spark", viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (points.length < 2) return chart;
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (at) => (100 * (at - first)) / (last - first || 1);
  const y = (value) => (high === low ? 13 : 24 - (22 * (value - low)) / (high - low));
  const path = points.map(([at, value], n) => `${n ? "L" : "M"}${x(at).toFixed(2)} ${y(value).toFixed(2)}`).join("");
  chart.append(svg("path", { d: path }));
  return chart;
}
