// The timeline of all ranks, and how mouse, fingers and keys change it.

const CLOSEST = 200; // how many times the whole can be magnified

function renderTimeline() {
  const rows = exhibits.flatMap((exhibit, e) => stepOf(e).ranks.map((rank, r) => ({
    ...rank,
    exhibit: e,
    layout: layoutOf(e),
    label: `rank ${rank.rank}`,
    heading: !alone && r === 0 && exhibit.title,
    pick: (bucket) => select(e, r, bucket),
  })));
  const isOn = (row, bucket) => row.exhibit === state.exhibit && bucket.index === state.bucket;
  const end = Math.max(...exhibits.map((_, e) => stepOf(e).end));
  fill("timeline", chart(rows, end, isOn));
}

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
  document.querySelector("#timeline .bucket.on")?.scrollIntoView({ block: "nearest", inline: "nearest" });
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

/** Magnify around a place, in pixels from the left. The browser scrolls. */
function zoom(factor, around = byId("timeline").clientWidth / 2) {
  const host = byId("timeline"), before = state.zoom;
  state.zoom = clamp(before * factor, 1, CLOSEST);
  const left = ((host.scrollLeft + around) * state.zoom) / before - around;
  renderTimeline();
  host.scrollLeft = left;
}

const pan = (pixels) => byId("timeline").scrollBy({ left: pixels });

const KEYS = {
  ArrowLeft: () => selectNeighbour(-1),
  ArrowRight: () => selectNeighbour(1),
  ArrowUp: () => selectRank(-1),
  ArrowDown: () => selectRank(1),
  w: () => zoom(1 / 0.6),
  s: () => zoom(0.6),
  a: () => pan(-120),
  d: () => pan(120),
  0: () => zoom(0),
  p: () => alone && turnTo(state.steps[0] - 1),
  n: () => alone && turnTo(state.steps[0] + 1),
};

/** Keys; a wheel with Ctrl, or a pinch on a touchpad. */
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
    zoom(Math.exp(-clamp(event.deltaY, -60, 60) / 120), event.clientX - host.getBoundingClientRect().left);
  }, { passive: false });
}
