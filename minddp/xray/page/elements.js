"use strict";
// Making elements, and writing figures.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

/** `html("td.soft", {title: "..."}, child, [children])`: tag and classes; attributes, if any; children. */
const html = (what, ...parts) => made(what, (tag) => document.createElement(tag), parts);
const svg = (what, ...parts) => made(what, (tag) => document.createElementNS(SVG, tag), parts);

/** Attributes that begin with "on" listen; those that are null or false are left out, as such children are. */
function made(what, create, parts) {
  const [tag, ...classes] = what.split(".");
  const node = create(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  const hasAttributes = parts[0]?.constructor === Object;
  for (const [name, value] of Object.entries(hasAttributes ? parts[0] : {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(parts.slice(hasAttributes ? 1 : 0)));
  return node;
}

const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== false);

/** Replace the content of an element of the page by these children. */
const fill = (id, ...children) => byId(id).replaceChildren(...present(children));

/** Text with `names in backticks` as code. */
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? html("code", part) : part));

function table(heads, rows) {
  return html("table",
    html("thead", html("tr", heads.map((head) => html("th", { scope: "col" }, head)))),
    html("tbody", rows.map((cells) => html("tr", cells.map((cell) => html("td", cell))))));
}

function ms(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ms`;
}

const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
function bytes(value) {
  const [unit, factor] = UNITS.find(([, size]) => value >= size) ?? ["bytes", 1];
  return `${Number((value / factor).toPrecision(3))} ${unit}`;
}

const isNotable = (value) => value > 0.005; // less is written as 0.00 ms
const percent = (share) => `${Math.round(100 * share)}%`;
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** The width of a text of the chart, in pixels. */
function textWidth(text) {
  pen.font = "600 12px Inter, system-ui, sans-serif";
  return pen.measureText(text).width;
}
const pen = document.createElement("canvas").getContext("2d");
