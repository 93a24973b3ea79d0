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
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? html("code", breakable(part)) : part));
}

/** A dotted name with possible line breaks at its dots. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [html("wbr"), part]).slice(1);

/** A name that keeps its end where there is not enough room: there names of parameters differ. */
const tail = (name) => html("span.tail", { title: name }, html("bdi", name));

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

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
/** How wide a text of the chart is, in pixels. */
function textWidth(text, weight = 400) {
  const key = `${weight} ${text}`;
  if (!widths.has(key)) {
    pen.font = `${weight} 12px Inter, system-ui, sans-serif`;
    widths.set(key, pen.measureText(text).width);
  }
  return widths.get(key);
}
