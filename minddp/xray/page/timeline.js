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
}

function timelineRow(e, r, isFirst) {
  const rank = stepOf(e).ranks[r];
  return {
    ...rank,
    exhibit: e,
    layout: layoutOf(e),
    label: `rank ${rank.rank}`,
    heading: !alone && isFirst && exhibits[e].title,
    pick: (bucket) => select(e, r, bucket),
  };
}

/** Of many ranks, the first, and the one that is selected. */
function shownRanks(e) {
  const isShown = (r) => state.allRanks || r < MOST_RANKS || (e === state.exhibit && r === state.rank);
  return stepOf(e).ranks.map((_, r) => r).filter(isShown);
}

// ---------------------------------------------------------------------- what is selected

function select(exhibit, rank, bucket) {
  Object.assign(state, { exhibit, rank, bucket });
  renderTimeline();
  renderBucket();
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

function pan(pixels) {
  const [from, to] = view();
  show(from - (pixels / (scale.right - scale.left)) * (to - from), to - from);
}

/** From when to when a bucket is drawn; of one that is not drawn at all, nothing. */
const extent = (bucket) => [bucket?.stretches[0]?.[0], bucket?.stretches.at(-1)?.[1]];

/** The selected bucket, if it is in view. */
function centreOfInterest() {
  const [from, to] = view(), [begin, end] = extent(selectedBucket());
  return end > from && begin < to ? (begin + end) / 2 : (from + to) / 2;
}

/** Move the view, if it is zoomed, so that a bucket can be seen. */
function reveal(bucket) {
  const [from, to] = view(), [begin, end] = extent(bucket);
  if (begin < from || end > to) show((begin + end - (to - from)) / 2, to - from);
}

// ---------------------------------------------------------------------- keys, mouse and fingers

const KEYS = {
  ArrowLeft: () => selectNeighbour(-1),
  ArrowRight: () => selectNeighbour(1),
  ArrowUp: () => selectRank(-1),
  ArrowDown: () => selectRank(1),
  w: () => zoom(0.6),
  s: () => zoom(1 / 0.6),
  a: () => pan(120),
  d: () => pan(-120),
  0: showAll,
  p: () => alone && turnTo(state.steps[0] - 1),
  n: () => alone && turnTo(state.steps[0] + 1),
};

/** Keys; a wheel with Ctrl, or a pinch on a touchpad; drags. A plain wheel scrolls the page, as everywhere. */
function listenToTimeline(host) {
  host.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  host.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const place = event.clientX - host.getBoundingClientRect().left;
    zoom(Math.exp(clamp(event.deltaY, -60, 60) / 120), scale.t(place));
  }, { passive: false });
  let travelled = 0;
  host.addEventListener("pointerdown", () => (travelled = 0));
  host.addEventListener("pointermove", (event) => {
    if (event.buttons === 0) return;
    travelled += Math.abs(event.movementX);
    if (travelled < DRAGGED) return;
    host.setPointerCapture(event.pointerId); // not before: a click would lose its target
    pan(event.movementX);
  });
}
