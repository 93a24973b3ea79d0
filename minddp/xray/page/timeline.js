// The timeline of all ranks: what is drawn of it, and how mouse, fingers and keys change that.

const MOST_RANKS = 8; // drawn until all are wanted
const CLOSEST = 2000; // how many times the whole can be magnified
const DRAGGED = 4; // pixels: less is a click
let scale = null; // of what is drawn now

function renderTimeline() {
  const rows = exhibits.flatMap((_, e) => shownRanks(e).map((r, place) => timelineRow(e, r, place === 0)));
  const isOn = (row, bucket) => row.exhibit === state.exhibit && bucket.index === state.bucket;
  scale = chart(byId("timeline"), rows, view(), isOn);
  const missing = sum(exhibits.map((_, e) => stepOf(e).ranks.length - shownRanks(e).length));
  byId("all-ranks").hidden = missing === 0;
  byId("all-ranks").textContent = `Show ${plural(missing, "more rank")}`;
  renderOverview();
}

function timelineRow(e, r, isFirst) {
  const rank = stepOf(e).ranks[r];
  return {
    ...rank,
    exhibit: e,
    layout: layoutOf(e),
    label: `rank ${rank.rank}`,
    sublabel: "computes",
    heading: !alone && isFirst && exhibits[e].title,
    note: `${ms(stepOf(e).length)}, ${plural(layoutOf(e).buckets.length, "message")}`,
    pick: (bucket) => select(e, r, bucket),
  };
}

/** Of many ranks, the first, and the one that is selected. */
function shownRanks(e) {
  const isShown = (r) => state.allRanks || r < MOST_RANKS || (e === state.exhibit && r === state.rank);
  return stepOf(e).ranks.map((_, r) => r).filter(isShown);
}

/** Which part of the step is in view, while that is not all. */
function renderOverview() {
  const [from, to] = view();
  const share = (t) => `${((100 * t) / longest()).toFixed(3)}%`;
  byId("overview").classList.toggle("idle", !state.view);
  byId("overview").style.marginLeft = `${scale.left}px`;
  byId("overview").firstElementChild.style.cssText = `left:${share(from)};width:${share(to - from)}`;
}

// ---------------------------------------------------------------------- what is selected

function select(exhibit, rank, bucket) {
  Object.assign(state, { exhibit, rank, bucket });
  renderTimeline();
  renderBucket();
  const stages = selectedBucket()?.life.map((stage) => `${stage.name} ${stage.took}`);
  const name = `Bucket ${bucket}, rank ${selectedRank().rank}`;
  byId("announcement").textContent = stages ? `${name}: ${stages.join(", ")}.` : "";
}

function selectNeighbour(by) {
  const { buckets } = selectedRank();
  if (!buckets.length) return;
  const place = buckets.findIndex((bucket) => bucket.index === state.bucket) + by;
  select(state.exhibit, state.rank, buckets[clamp(place, 0, buckets.length - 1)].index);
  reveal(selectedBucket());
}

/** The same bucket on the rank above or below, which may be of another recording. */
function selectRank(by) {
  const places = exhibits.flatMap((_, e) => stepOf(e).ranks.map((_rank, r) => [e, r]));
  const here = places.findIndex(([e, r]) => e === state.exhibit && r === state.rank);
  const [e, r] = places[clamp(here + by, 0, places.length - 1)];
  const { buckets } = stepOf(e).ranks[r];
  const hasIt = buckets.some((bucket) => bucket.index === state.bucket);
  select(e, r, hasIt ? state.bucket : buckets[0]?.index ?? null);
}

function turnTo(step) {
  state.steps[0] = clamp(step, 0, exhibits[0].steps.length - 1);
  selectWorst();
  render();
}

// ---------------------------------------------------------------------- what is in view

/** Show `length` ms from `from` on, within what there is. */
function show(from, length) {
  const all = longest();
  const kept = clamp(length, all / CLOSEST, all);
  const begin = clamp(from, 0, all - kept);
  state.view = kept > 0.999 * all ? null : [begin, begin + kept];
  renderTimeline();
}

const showAll = () => show(0, Infinity);

function zoom(factor, around = centreOfInterest()) {
  const [from, to] = view();
  show(around - (around - from) * factor, (to - from) * factor);
}

/** The selected bucket, if it is in view. */
function centreOfInterest() {
  const [from, to] = view();
  const bucket = state.bucket === null ? null : selectedBucket();
  const inView = bucket && bucket.end > from && bucket.pending < to;
  return inView ? (bucket.pending + bucket.end) / 2 : (from + to) / 2;
}

function pan(pixels) {
  const [from, to] = view();
  show(from - (pixels / (scale.right - scale.left)) * (to - from), to - from);
}

/** Move the view, if it is zoomed, so that a bucket can be seen. */
function reveal(bucket) {
  if (!state.view) return;
  const [from, to] = state.view;
  if (bucket.pending < from || bucket.end > to) show((bucket.pending + bucket.end - (to - from)) / 2, to - from);
}

// ---------------------------------------------------------------------- keys, mouse and fingers

const KEYS = {
  ArrowLeft: () => selectNeighbour(-1),
  ArrowRight: () => selectNeighbour(1),
  ArrowUp: () => selectRank(-1),
  ArrowDown: () => selectRank(1),
  w: () => zoom(0.6),
  "+": () => zoom(0.6),
  "=": () => zoom(0.6), // the key of "+", without shift
  s: () => zoom(1 / 0.6),
  "-": () => zoom(1 / 0.6),
  a: () => pan(120),
  d: () => pan(-120),
  0: showAll,
  Escape: showAll,
  p: () => alone && turnTo(state.steps[0] - 1),
  n: () => alone && turnTo(state.steps[0] + 1),
};

function listenToKeys(host) {
  host.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

/** A plain wheel scrolls the page, as everywhere; with Ctrl, or by a pinch on a touchpad, it zooms. */
function listenToWheel(host) {
  const turn = (event) => {
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const factor = Math.exp(clamp(event.deltaY, -60, 60) / 120);
    if (event.ctrlKey || event.metaKey) zoom(factor, scale.t(placeOf(host, event)));
    else if (isSideways) pan(-(event.deltaX || event.deltaY));
    else return;
    event.preventDefault();
  };
  host.addEventListener("wheel", turn, { passive: false });
  host.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 2 : 0.5, scale.t(placeOf(host, event))));
}

const placeOf = (host, event) => event.clientX - host.getBoundingClientRect().left;

/** One pointer drags the view, two pinch it, and one that hardly moves clicks. */
function listenToPointers(host) {
  const places = new Map(); // of the pointers that are down, by their id
  let travelled = 0;
  const move = (event) => {
    if (!places.has(event.pointerId)) return;
    const [before, now] = [places.get(event.pointerId), placeOf(host, event)];
    travelled += Math.abs(now - before);
    places.set(event.pointerId, now);
    if (travelled < DRAGGED) return;
    host.setPointerCapture(event.pointerId); // not before: a click would lose its target
    host.classList.add("dragging");
    const other = [...places].find(([id]) => id !== event.pointerId)?.[1];
    if (other === undefined) pan(now - before);
    else pinch(Math.abs(before - other), Math.abs(now - other), (now + other) / 2);
  };
  const release = (event) => {
    places.delete(event.pointerId);
    host.classList.remove("dragging");
  };
  host.addEventListener("pointerdown", (event) => {
    places.set(event.pointerId, placeOf(host, event));
    travelled = 0;
  });
  host.addEventListener("pointermove", move);
  host.addEventListener("pointerup", release);
  host.addEventListener("pointercancel", release);
  host.addEventListener("click", (event) => {
    if (travelled < DRAGGED) event.target.closest(".bucket")?.pick();
  });
}

function pinch(before, now, middle) {
  if (now > 8) zoom(before / now, scale.t(middle)); // closer fingers say nothing exact
}

function listenToOverview(host) {
  const moveTo = (event) => {
    if (event.buttons === 0) return;
    host.setPointerCapture(event.pointerId);
    const [from, to] = view();
    const centre = (placeOf(host, event) / host.clientWidth) * longest();
    show(centre - (to - from) / 2, to - from);
  };
  host.addEventListener("pointerdown", moveTo);
  host.addEventListener("pointermove", moveTo);
}

// ---------------------------------------------------------------------- what lies under the pointer

/** A line through all ranks, with the time on the axis. */
function showTime(host, event) {
  host.querySelector(".cursor")?.remove();
  const x = placeOf(host, event);
  if (event.pointerType === "touch" || x < scale.left || x > scale.right) return;
  const text = ms(scale.t(x)), half = textWidth(text) / 2 + 5;
  const centre = clamp(x, half, host.clientWidth - half);
  host.firstElementChild.append(svg("g.cursor",
    svg("line", { x1: x, x2: x, y1: 17, y2: host.clientHeight }),
    svg("rect", { x: centre - half, y: 0, width: 2 * half, height: 17, rx: 4 }),
    svg("text", { x: centre, y: 12.5, "text-anchor": "middle" }, text)));
}

function listenForCursor(host) {
  host.addEventListener("pointermove", (event) => showTime(host, event));
  host.addEventListener("pointerleave", () => host.querySelector(".cursor")?.remove());
}

/** An element with a `tip()`, a title and lines, shows it next to the pointer. */
function listenForTips() {
  const tip = byId("tip");
  document.addEventListener("pointermove", (event) => {
    const target = event.pointerType === "touch" ? null : event.target;
    const about = target?.closest && (target.closest(".bucket") ?? target).tip;
    tip.hidden = !about;
    if (!about) return;
    const [title, ...lines] = about();
    tip.replaceChildren(html("b", title), ...lines.filter(Boolean).map((line) => html("div", line)));
    const { width, height } = tip.getBoundingClientRect();
    const below = event.clientY + 18;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
    tip.style.top = `${below + height > innerHeight ? event.clientY - height - 12 : below}px`;
  });
  document.documentElement.addEventListener("pointerleave", () => (tip.hidden = true));
}
