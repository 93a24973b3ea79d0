"use strict";
// Draws what `payload.py` has decided. Times are milliseconds from the beginning of their step.

const data = JSON.parse(document.getElementById("data").textContent);
const exhibits = data.exhibits;
const alone = exhibits.length === 1;
const state = {
  steps: exhibits.map((exhibit) => exhibit.typical), // for each exhibit, the index of the step shown
  exhibit: 0, rank: 0, bucket: null, // what is selected; `rank` is an index into the step's ranks
  view: null, // [from, to] in ms, or null for all
  allRanks: false,
  plan: 0,
};

// ---------------------------------------------------------------------- small helpers

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

/** Text with `names in backticks` as code. */
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

function ms(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ms`;
}

function bytes(value) {
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= factor) return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }
  return `${value} bytes`;
}

const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const className = (activity) => activity.replaceAll(" ", "-");

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
function textWidth(text, weight = 400) {
  const key = `${weight} ${text}`;
  if (!widths.has(key)) {
    pen.font = `${weight} 12px Inter, system-ui, sans-serif`;
    widths.set(key, pen.measureText(text).width);
  }
  return widths.get(key);
}

const stepOf = (e) => exhibits[e].steps[state.steps[e]];
const layoutOf = (e) => exhibits[e].layouts[stepOf(e).layout];
const selectedRank = () => stepOf(state.exhibit).ranks[state.rank];
const selectedBucket = () => selectedRank().buckets.find((bucket) => bucket.index === state.bucket);
const longest = () => Math.max(...exhibits.map((_, e) => stepOf(e).end));
const view = () => state.view || [0, longest()];

// ---------------------------------------------------------------------- the chart: rows on one axis

const BAR = 30, TICKS = 12, LANE = 26, GAP = 4, BETWEEN = 20, AXIS = 24, HEADING = 30, RIGHT = 10;
const TICKS_TOP = BAR + 3, LANE_TOP = TICKS_TOP + TICKS + GAP, ROW = LANE_TOP + LANE;

/**
 * Draw rows one below the other; returns the scale, for whoever wants to know what lies where.
 *
 * A row has {label, spans, ready, buckets, backwardEnd, layout, heading, note, exhibit, rank}; a bucket {index, pending,
 * begin, end}. `isOn(row, bucket)` tells what is selected.
 */
function chart(host, rows, [from, to], isOn = () => false) {
  const width = Math.max(host.clientWidth, 280);
  const left = width < 620 ? 58 : 86;
  const scale = { left, right: width - RIGHT, from, to };
  scale.x = (t) => left + ((t - from) / (to - from)) * (scale.right - left);
  scale.t = (x) => from + ((x - left) / (scale.right - left)) * (to - from);
  let y = AXIS;
  for (const row of rows) {
    if (row.heading) y += HEADING;
    row.top = y;
    y += ROW + BETWEEN;
  }
  const height = y - BETWEEN + 6;
  const clip = `clip-${host.id}`;
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  const picture = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    patterns(clip, left, width, height), axis(scale, height), inside);
  for (const row of rows) {
    picture.append(...labels(row, left));
    inside.append(...computing(row, scale), ...gradients(row, scale, isOn), ...sending(row, scale, isOn));
  }
  for (const row of rows) inside.append(...arrow(row, scale, isOn));
  host.replaceChildren(picture);
  return scale;
}

function patterns(clip, left, width, height) {
  const hatch = (id, back, line, size) =>
    svg("pattern", { id, width: size, height: size, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { width: size, height: size, class: back }),
      svg("line", { x1: 0, y1: 0, x2: 0, y2: size, class: line }));
  return svg("defs", {},
    svg("clipPath", { id: clip }, svg("rect", { x: left - 2, y: 0, width: width - left - RIGHT + 6, height })),
    hatch("stands-still", "hatch-red-back", "hatch-red", 7),
    hatch("pending", "hatch-green-back", "hatch-green", 5));
}

function axis({ x, from, to, left, right }, height) {
  const rough = ((to - from) / Math.max(2, (right - left) / 90));
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((f) => f * power).find((d) => d >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(distance)));
  const marks = [];
  for (let k = Math.ceil(from / distance - 1e-9); k * distance <= to + 1e-9; k++) {
    const at = x(k * distance);
    const label = `${(k * distance).toFixed(digits)}${k * distance + distance > to ? " ms" : ""}`;
    marks.push(svg("line", { class: "grid", x1: at, x2: at, y1: AXIS - 6, y2: height }),
      svg("text", { class: "soft small", x: at, y: 12, "text-anchor": at > right - 30 ? "end" : "middle" }, label));
  }
  return svg("g", {}, marks);
}

function labels(row, left) {
  const text = (y, label, classes) => svg("text", { x: 0, y: row.top + y, class: classes }, label);
  const parts = [text(BAR / 2 + 4, row.label, "strong")];
  if (left > 60) {
    parts[0].setAttribute("y", row.top + 13);
    parts.push(text(27, row.above || "computes", "soft small"), text(LANE_TOP + LANE / 2 + 4, "sends", "soft small"));
  }
  if (row.heading) {
    parts.push(svg("text", { x: 0, y: row.top - 12, class: "strong" }, row.heading,
      svg("tspan", { class: "soft", dx: 10, "font-weight": 400 }, row.note)));
  }
  return parts;
}

function computing(row, scale) {
  const x = scale.x, parts = [];
  for (const [kind, begin, end, bucket] of row.spans) {
    const activity = data.activities[kind], [left, right] = [x(begin), x(end)];
    if (right < scale.left || left > scale.right || right - left < 0.15) continue;
    const width = Math.max(0.6, right - left - (right - left > 4 ? 1 : 0));
    const rect = svg("rect", { x: left, y: row.top, width, height: BAR, rx: width > 6 ? 3 : 0, class: className(activity) });
    rect.tip = () => [activity === "exposed communication" ? "stands still" : activity,
      `${ms(end - begin)}${bucket >= 0 ? `, bucket ${bucket}` : ""}`];
    const texts = activity === "exposed communication" ? ["stands still", "waits"] : [activity];
    parts.push(rect, ...fitted(texts, left, right, scale, row.top + BAR / 2 + 4, `on-${className(activity)}`));
  }
  if (row.backwardEnd !== null) {
    parts.push(svg("line", { class: "rule", x1: x(row.backwardEnd), x2: x(row.backwardEnd), y1: row.top - 5, y2: row.top + ROW + 4 }));
  }
  return parts;
}

/** The first of the texts that has room in the visible part of what lies between two places. */
function fitted(texts, begin, end, scale, y, classes) {
  const [left, right] = [Math.max(begin, scale.left), Math.min(end, scale.right)];
  const weight = classes.includes("exposed") ? 600 : 400;
  const text = texts.find((candidate) => textWidth(candidate, weight) + 12 < right - left);
  return text === undefined ? [] : [svg("text", { x: (left + right) / 2, y, class: `label ${classes}`, "text-anchor": "middle" }, text)];
}

function gradients(row, { x, left, right }, isOn) {
  const on = new Set(row.buckets.filter((bucket) => isOn(row, bucket)).flatMap((b) => row.layout.buckets[b.index].params));
  const paths = { off: "", on: "" }, y = row.top + TICKS_TOP;
  let last = -1;
  for (const [param, t] of row.ready) {
    const at = x(t);
    if (at < left - 1 || at > right + 1) continue;
    if (on.has(param)) paths.on += `M${at.toFixed(1)} ${y}v${TICKS}`;
    else if (at - last > 0.4) { paths.off += `M${at.toFixed(1)} ${y}v${TICKS - 3}`; last = at; }
  }
  return [svg("path", { class: "tick", d: paths.off || "M0 0" }), svg("path", { class: "tick on", d: paths.on || "M0 0" })];
}

function sending(row, scale, isOn) {
  const { x, left, right } = scale, y = row.top + LANE_TOP, writing = [];
  const parts = [svg("rect", { class: "lane", x: left, y, width: right - left, height: LANE, rx: 3 })];
  for (const bucket of row.buckets) {
    const [pending, begin, end] = [x(bucket.pending), x(bucket.begin), Math.max(x(bucket.end), x(bucket.begin) + 2.5)];
    const split = row.backwardEnd === null ? end : Math.min(end, Math.max(begin, x(row.backwardEnd)));
    const shapes = [];
    const bar = (from, to, classes) => {
      if (to - from > 0.3) shapes.push(svg("rect", { x: from, y, width: to - from, height: LANE, class: classes }));
    };
    bar(pending, begin, "pending");
    bar(begin, split, "wire");
    bar(split, end, "late");
    if (end - begin > 5) shapes.push(svg("line", { x1: end, x2: end, y1: y, y2: y + LANE, stroke: "var(--card)", "stroke-width": 1.5 }));
    const size = bytes(row.layout.buckets[bucket.index].nbytes);
    const texts = [`bucket ${bucket.index}, ${size}`, `${bucket.index}: ${size}`, `${bucket.index}`];
    const where = split - begin > end - split ? [begin, split, "on-wire"] : [split, end, "on-late"];
    writing.push(...fitted(texts, where[0], where[1], scale, y + LANE / 2 + 4, where[2]));
    if (isOn(row, bucket)) {
      shapes.push(svg("rect", { class: "outline", x: pending - 1, y: y - 1, width: end - pending + 2, height: LANE + 2, rx: 3 }));
    }
    const group = svg("g", { class: "bucket", "data-bucket": bucket.index }, shapes);
    if (row.rank !== undefined) group.pick = () => select(row.exhibit, row.rank, bucket.index);
    group.tip = () => [`bucket ${bucket.index}, ${row.label}`, bucketTip(row, bucket, size)];
    parts.push(group);
  }
  return [...parts, ...writing];
}

function bucketTip(row, bucket, size) {
  const waits = bucket.begin - bucket.launched;
  const before = waits > 0.05 ? `${ms(waits)} until it can move, then ` : "";
  return `${plural(row.layout.buckets[bucket.index].params.length, "gradient")}, ${size}; ${before}${ms(bucket.end - bucket.begin)} on the wire`;
}

/** From the last gradient of the selected bucket to its launch. */
function arrow(row, { x }, isOn) {
  return row.buckets.filter((bucket) => isOn(row, bucket) && bucket.lastGradient != null).flatMap((bucket) => {
    const [a, b] = [x(bucket.lastGradient), x(bucket.launched)], [top, bottom] = [row.top + TICKS_TOP + TICKS, row.top + LANE_TOP];
    return [svg("path", { class: "arrow", d: `M${a} ${top}C${a} ${bottom} ${b} ${top} ${b} ${bottom}` }),
      svg("circle", { class: "arrow-head", cx: a, cy: top, r: 2.2 })];
  });
}

// ---------------------------------------------------------------------- the timeline and its keys

const MOST_RANKS = 8;
let scale = null;

function renderTimeline() {
  const rows = exhibits.flatMap((exhibit, e) => shownRanks(e).map((r, place) => ({
    ...stepOf(e).ranks[r],
    exhibit: e, rank: r, layout: layoutOf(e), label: `rank ${stepOf(e).ranks[r].rank}`,
    heading: alone || place > 0 ? null : exhibit.title,
    note: alone ? "" : `${ms(stepOf(e).length)}, ${plural(layoutOf(e).buckets.length, "message")}`,
  })));
  const hidden = exhibits.reduce((sum, _, e) => sum + stepOf(e).ranks.length - shownRanks(e).length, 0);
  byId("all-ranks").hidden = hidden === 0;
  byId("all-ranks").textContent = `Show ${hidden} more ranks`;
  const isOn = (row, bucket) => row.exhibit === state.exhibit && bucket.index === state.bucket;
  scale = chart(byId("timeline"), rows, view(), isOn);
}

/** Of many ranks, the first, and the one that is selected. */
function shownRanks(e) {
  const places = stepOf(e).ranks.map((_, r) => r);
  return state.allRanks ? places : places.filter((r) => r < MOST_RANKS || (e === state.exhibit && r === state.rank));
}

function select(exhibit, rank, bucket) {
  Object.assign(state, { exhibit, rank, bucket });
  renderTimeline();
  renderBucket();
  const selected = selectedBucket();
  byId("announcement").textContent = selected
    ? `Bucket ${bucket}, rank ${selectedRank().rank}: ${selected.life.map(([name, , took]) => `${name} ${took}`).join(", ")}.` : "";
}

function selectNeighbour(by) {
  const buckets = selectedRank().buckets;
  if (!buckets.length) return;
  const place = buckets.findIndex((bucket) => bucket.index === state.bucket) + by;
  select(state.exhibit, state.rank, buckets[Math.min(Math.max(place, 0), buckets.length - 1)].index);
  reveal(selectedBucket());
}

function selectRank(by) {
  const places = exhibits.flatMap((_, e) => stepOf(e).ranks.map((_rank, r) => [e, r]));
  const here = places.findIndex(([e, r]) => e === state.exhibit && r === state.rank);
  const [e, r] = places[Math.min(Math.max(here + by, 0), places.length - 1)];
  const buckets = stepOf(e).ranks[r].buckets;
  const index = buckets.some((bucket) => bucket.index === state.bucket) ? state.bucket : buckets[0]?.index ?? null;
  select(e, r, index);
}

/** Move the view, if it is zoomed, so that a bucket can be seen. */
function reveal(bucket) {
  if (!state.view) return;
  const [from, to] = state.view;
  if (bucket.pending < from || bucket.end > to) show((bucket.pending + bucket.end) / 2 - (to - from) / 2, to - from);
}

/** Show `length` ms from `from` on, within what there is. */
function show(from, length) {
  const all = longest();
  const kept = Math.min(Math.max(length, all / 2000), all);
  const begin = Math.min(Math.max(from, 0), all - kept);
  state.view = kept > all * 0.999 ? null : [begin, begin + kept];
  renderTimeline();
}

function zoom(factor, around = null) {
  const [from, to] = view();
  const bucket = state.bucket === null ? null : selectedBucket();
  const inView = bucket && bucket.end > from && bucket.begin < to;
  const t = around ?? (inView ? (bucket.pending + bucket.end) / 2 : (from + to) / 2);
  show(t - (t - from) * factor, (to - from) * factor);
}

function turnTo(step) {
  const steps = exhibits[0].steps;
  state.steps[0] = Math.min(Math.max(step, 0), steps.length - 1);
  state.view = null;
  choosePlaceToBegin();
  render();
}

const KEYS = {
  ArrowLeft: () => selectNeighbour(-1), ArrowRight: () => selectNeighbour(1),
  ArrowUp: () => selectRank(-1), ArrowDown: () => selectRank(1),
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
  "0": () => show(0, Infinity), Escape: () => show(0, Infinity),
  "[": () => alone && turnTo(state.steps[0] - 1), "]": () => alone && turnTo(state.steps[0] + 1),
};

function listen() {
  const host = byId("timeline");
  const pointers = new Map();
  let moved = 0;
  const at = (event) => event.clientX - host.getBoundingClientRect().left;
  host.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  host.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.min(Math.max(event.deltaY, -60), 60) / 120), scale.t(at(event)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan(-(event.deltaX || event.deltaY));
    }
  }, { passive: false });
  host.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 2 : 0.5, scale.t(at(event))));
  host.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, at(event)); moved = 0; });
  host.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const [before, now] = [pointers.get(event.pointerId), at(event)];
    moved += Math.abs(now - before);
    if (moved < 4) return;
    if (!host.hasPointerCapture(event.pointerId)) host.setPointerCapture(event.pointerId);
    host.classList.add("dragging");
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    pointers.set(event.pointerId, now);
    if (other === undefined) pan(now - before);
    else if (Math.abs(now - other) > 8) zoom(Math.abs(before - other) / Math.abs(now - other), scale.t((now + other) / 2));
  });
  const release = (event) => { pointers.delete(event.pointerId); host.classList.remove("dragging"); };
  host.addEventListener("pointerup", release);
  host.addEventListener("pointercancel", release);
  host.addEventListener("click", (event) => {
    const group = event.target.closest(".bucket");
    if (group?.pick && moved < 4) group.pick();
  });
}

function pan(pixels) {
  const [from, to] = view();
  show(from - (pixels / (scale.right - scale.left)) * (to - from), to - from);
}

/** What lies under the pointer, next to it. */
function listenForTips() {
  const tip = byId("tip");
  document.addEventListener("pointermove", (event) => {
    const target = event.pointerType === "touch" ? null : event.target;
    const about = target?.closest && (target.closest(".bucket") || target).tip;
    tip.hidden = !about;
    if (!about) return;
    const [title, text] = about();
    tip.replaceChildren(element("b", {}, title), text);
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });
}

// ---------------------------------------------------------------------- everything in words

function renderSummary() {
  const exhibit = exhibits[0], step = stepOf(0);
  byId("setting").textContent = alone ? `${exhibit.title}, ${exhibit.wrapper}, ${exhibit.place}` : exhibit.place;
  byId("headline").textContent = alone ? step.headline : comparisonHeadline();
  byId("sentences").replaceChildren(...(alone ? step.sentences.flatMap((s) => [...prose(s), " "]) : [comparisonLead()]));
  const tells = alone && exhibit.suggestion && state.steps[0] === exhibit.typical;
  byId("suggestion").hidden = !tells;
  if (tells) byId("suggestion").replaceChildren(element("b", {}, "What to try:"), ...prose(exhibit.suggestion));
  byId("comparison").hidden = alone;
  if (!alone) byId("comparison").replaceChildren(comparisonTable());
  byId("facts").replaceChildren(...exhibits.map((e) => element("p", {}, alone ? "" : `${e.title}: `, e.facts.join(" "))));
}

const STILL = data.activities.indexOf("exposed communication"), COPY = data.activities.indexOf("copy back");
const waitOf = (e) => Math.max(...stepOf(e).ranks.map((rank) => rank.parts[STILL]));

function comparisonHeadline() {
  const order = exhibits.map((_, e) => e).sort((a, b) => stepOf(a).length - stepOf(b).length);
  const [best, worst] = [order[0], order[order.length - 1]];
  return `${exhibits[best].title} takes ${ms(stepOf(best).length)} a step, ${exhibits[worst].title} ${ms(stepOf(worst).length)}.`;
}

function comparisonLead() {
  return `${exhibits.length} recordings on one scale: for each, the step of median length. Compare what sticks out behind backward.`;
}

function comparisonTable() {
  const heads = ["", "step", "stands still", "messages", "bytes", "hidden"];
  const rows = exhibits.map((exhibit, e) => {
    const layout = layoutOf(e), least = Math.min(...stepOf(e).ranks.map((rank) => rank.overlap));
    const total = layout.buckets.reduce((sum, bucket) => sum + bucket.nbytes, 0);
    return [exhibit.title, ms(stepOf(e).length), ms(waitOf(e)), layout.buckets.length, bytes(total), `${Math.round(100 * least)}%`];
  });
  return table(heads, rows);
}

function table(heads, rows) {
  return element("table", {},
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", {}, cell))))));
}

function renderSteps() {
  const steps = exhibits[0].steps, shown = state.steps[0];
  const most = Math.max(...steps.map((step) => step.length));
  const label = element("span", { class: "label" }, `step ${steps[shown].number}${shown === exhibits[0].typical && steps.length > 1 ? ", the median" : ""}`);
  byId("steps").hidden = !alone || steps.length < 2;
  byId("steps").replaceChildren(label, ...steps.map((step, k) => element("button", {
    type: "button", style: `height:${(8 + 18 * (step.length / most)).toFixed(0)}px`, "aria-pressed": `${k === shown}`,
    "aria-label": `Step ${step.number}, ${ms(step.length)}`, title: `step ${step.number}: ${ms(step.length)}`, onclick: () => turnTo(k),
  })));
}

function renderKey() {
  const swatch = (classes) => svg("svg", { width: 22, height: 13, "aria-hidden": "true" },
    svg("rect", { width: 22, height: 13, class: classes }));
  const ticks = svg("svg", { width: 22, height: 13, "aria-hidden": "true" }, svg("path", { class: "tick", d: "M4 1v11M9 1v11M12 1v11M18 1v11" }));
  const entries = [
    [swatch("forward"), "forward"], [swatch("backward"), "backward"], [ticks, "a gradient is ready"],
    [swatch("wire"), "on the wire during backward"], [swatch("late"), "on the wire after it"],
    [swatch("pending"), "waits for other ranks"], [swatch("exposed-communication"), "rank stands still"],
    [swatch("optimizer"), "optimizer"],
  ];
  byId("key").replaceChildren(...entries.map(([sign, text]) => element("li", {}, sign, text)));
}

function renderBucket() {
  const bucket = state.bucket === null ? null : selectedBucket();
  byId("bucket").hidden = !bucket;
  if (!bucket) return;
  const layout = layoutOf(state.exhibit), info = layout.buckets[bucket.index], rank = selectedRank();
  const place = alone ? "" : `${exhibits[state.exhibit].title}, `;
  const ready = new Map(rank.ready);
  const params = [...info.params].sort((a, b) => (ready.get(a) ?? 0) - (ready.get(b) ?? 0));
  const rows = params.map((p) => [layout.params[p][0], bytes(layout.params[p][1]), ready.has(p) ? ms(ready.get(p)) : "not at all"]);
  const list = table(["gradient, as they arrive", "size", "ready at"], rows);
  for (const row of list.tBodies[0].rows) row.cells[0].title = row.cells[0].textContent;
  list.tBodies[0].lastElementChild?.classList.add("last");
  byId("bucket").replaceChildren(
    element("h2", { id: "bucket-title" }, `Bucket ${bucket.index}, ${place}rank ${rank.rank} `,
      element("span", { class: "aside" }, `${bytes(info.nbytes)}, ${plural(info.params.length, "gradient")}; `
        + `number ${bucket.index + 1} of ${layout.buckets.length} to leave`)),
    element("div", { class: "two" },
      element("div", {},
        element("ol", { class: "life" }, bucket.life.map(([name, , took, sentence]) => element("li", {},
          element("span", { class: "name" }, name), element("span", { class: "took soft" }, took), element("span", { class: "sentence" }, prose(sentence))))),
        element("p", { class: "verdict" }, prose(bucket.verdict))),
      element("div", { class: "scroll params", tabindex: 0, role: "region", "aria-label": "Gradients of the bucket" }, list)));
}

function renderParts() {
  const rows = exhibits.flatMap((exhibit, e) => stepOf(e).ranks.map((rank) => [exhibit, rank]));
  const shown = data.activities.map((_, k) => k).filter((k) => rows.some(([, rank]) => rank.parts[k] > 0.005));
  const most = Math.max(...rows.flatMap(([, rank]) => rank.parts));
  const cell = (value, activity) => element("td", {}, ms(value),
    element("span", { class: "meter", style: `width:${(100 * value / most).toFixed(1)}%;background:${colourOf(activity)}` }));
  const head = (activity) => element("th", { scope: "col" },
    element("span", { class: "swatch", style: `background:${colourOf(activity)}` }), activity === "exposed communication" ? "stands still" : activity);
  byId("parts").replaceChildren(
    element("h2", { id: "parts-title" }, "Where the step goes"),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Where the step goes", style: "margin-top:10px" },
      element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""), element("th", { scope: "col" }, "step"),
          shown.map((k) => head(data.activities[k])), element("th", { scope: "col" }, "hidden"))),
        element("tbody", {}, rows.map(([exhibit, rank]) => element("tr", {},
          element("td", {}, `${alone ? "" : `${exhibit.title}, `}rank ${rank.rank}`), element("td", {}, element("b", {}, ms(rank.end - rank.begin))),
          shown.map((k) => cell(rank.parts[k], data.activities[k])), element("td", {}, `${Math.round(100 * rank.overlap)}%`)))))),
    element("p", { class: "note" }, "A step lasts from the beginning of a forward to that of the next. Hidden: the share of the "
      + "communication for which the rank did not stand still."));
}

function colourOf(activity) {
  const names = { loss: "quiet", "copy back": "quiet", buffers: "forward", rebuild: "forward", "exposed communication": "exposed" };
  return `var(--${names[activity] || activity})`;
}

// ---------------------------------------------------------------------- the same step under another plan

function renderPlans() {
  const plans = alone ? exhibits[0].plans : [];
  byId("plans").hidden = plans.length < 2 || state.steps[0] !== exhibits[0].typical;
  if (byId("plans").hidden) return;
  const most = Math.max(...plans.map((plan) => plan.length));
  const chosen = plans[state.plan];
  const host = element("div", { id: "plan-chart", class: "plan-chart", style: "margin-top:14px" });
  byId("plans").replaceChildren(
    element("h2", { id: "plans-title" }, "The same step under another plan, predicted"),
    element("div", { class: "plans", role: "radiogroup", "aria-labelledby": "plans-title" }, plans.map((plan, k) => planRow(plan, k, most))),
    element("p", { class: "plan-code" }, chosen.code ? [element("code", {}, `DistributedDataParallel(model, ${chosen.code})`)]
      : [element("span", { class: "soft" }, state.plan ? "The constructor's defaults." : "As it was recorded, put through the model: compare it with the timeline above.")]),
    host,
    element("p", { class: "note" }, exhibits[0].model));
  chart(host, planRows(plans[0], chosen), [0, Math.max(longest(), ...[plans[0], chosen].map((plan) => plan.length))]);
}

function planRow(plan, k, most) {
  const hidden = plan.length - plan.exposed, more = 100 * (plan.length / exhibits[0].plans[0].length - 1);
  const change = k === 0 ? "" : Math.abs(more) < 0.5 ? "same" : `${more > 0 ? "+" : "−"}${Math.abs(more).toFixed(0)}%`;
  const part = (value, colour) => element("i", { style: `width:${(100 * value / most).toFixed(2)}%;background:var(--${colour})` });
  return element("label", { class: `plan${k === state.plan ? " on" : ""}` },
    element("input", { type: "radio", name: "plan", value: k, checked: k === state.plan, onchange: () => choosePlan(k) }),
    element("span", {}, plan.title), element("span", { class: "buckets soft" }, plural(plan.sizes.length, "bucket")),
    element("span", { class: "track", "aria-hidden": "true" }, part(hidden, "quiet"), part(plan.exposed, "exposed")),
    element("span", { class: "time" }, ms(plan.length)), element("span", { class: "change soft" }, change));
}

function choosePlan(k) {
  state.plan = k;
  renderPlans();
  document.querySelector(`input[name=plan][value="${k}"]`).focus();
}

/** The recorded step and the predicted one, on the rank that stands still longest. */
function planRows(recorded, chosen) {
  const step = stepOf(0), r = step.ranks.reduce((most, rank, k) => (rank.parts[STILL] > step.ranks[most].parts[STILL] ? k : most), 0);
  const rank = step.ranks[r], predicted = chosen.ranks[r];
  const layout = { params: [], buckets: chosen.sizes.map((nbytes) => ({ nbytes, params: [] })) };
  const buckets = predicted.buckets.map(([launched, begin, end], index) => ({ index, launched, pending: begin, begin, end }));
  return [
    { ...rank, layout: layoutOf(0), label: "recorded", above: `rank ${rank.rank}` },
    { ...rank, layout, buckets, label: "predicted", above: `rank ${rank.rank}`, spans: predictedSpans(rank, predicted) },
  ];
}

/** Up to the end of backward as recorded, then the predicted waits and copies, then the rest of the recorded step. */
function predictedSpans(rank, predicted) {
  const before = rank.spans.filter(([, , end]) => end <= rank.backwardEnd);
  let t = predicted.after.at(-1)?.[2] ?? rank.backwardEnd;
  const rest = rank.spans.filter(([kind, , end]) => end > rank.backwardEnd && kind !== STILL && kind !== COPY)
    .map(([kind, begin, end, bucket]) => [kind, t, (t += end - begin), bucket]);
  return [...before, ...predicted.after, ...rest];
}

// ---------------------------------------------------------------------- beginning

/** Begin with the bucket that hurts most. */
function choosePlaceToBegin() {
  const step = stepOf(0), worst = step.worst;
  const rank = worst ? step.ranks.findIndex((candidate) => candidate.rank === worst[0]) : 0;
  const bucket = worst ? worst[1] : step.ranks[0].buckets.at(-1)?.index ?? null;
  Object.assign(state, { exhibit: 0, rank, bucket });
}

function listenForTheme() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { root.dataset.theme = system.matches ? "dark" : "light"; };
  system.addEventListener("change", apply);
  byId("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
  apply();
}

function render() {
  renderSummary();
  renderSteps();
  renderTimeline();
  renderBucket();
  renderParts();
  renderPlans();
}

listenForTheme();
byId("zoom-in").addEventListener("click", () => zoom(0.6));
byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
byId("zoom-fit").addEventListener("click", () => show(0, Infinity));
byId("all-ranks").addEventListener("click", () => { state.allRanks = true; renderTimeline(); });
choosePlaceToBegin();
state.plan = exhibits[0].bestPlan;
renderKey();
render();
listen();
listenForTips();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; render(); } });
