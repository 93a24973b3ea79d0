"use strict";
// Elements and figures.

const byId = (id) => document.getElementById(id);

/**
 * `html("td.soft", {title: "..."}, child, [children])`: tag and classes; attributes, if any; children.
 *
 * Attributes that begin with "on" are listeners. Attributes and children that are null or false are left out.
 */
function html(what, ...parts) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  node.className = classes.join(" ");
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

function ms(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ms`;
}

const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
