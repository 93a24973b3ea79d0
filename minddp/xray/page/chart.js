// Ranks' rows on one axis of time, as an SVG. Times are milliseconds.
//
// A row has a label, perhaps a heading above; `spans` [activity, begin, end, bucket], which tile the rank's step;
// `ready` [param, time]; `backwardEnd`; a `layout`; and `buckets`. A bucket has an index and stretches [begin, end,
// moves, exposed]: its bytes move or it waits for other ranks, and its own rank stands still meanwhile or does not.
//
// Colour is cost: green is hidden behind computation, red is exposed. Texture: solid moves, hatched waits.

const BAR = 30, TICKS = 12, LANE = 26, BETWEEN = 20, AXIS = 26, HEADING = 30, RIGHT = 10; // pixels
const TICKS_TOP = BAR + 3, LANE_TOP = TICKS_TOP + TICKS + 4, ROW = LANE_TOP + LANE;
const LEAST_BUCKET = 2.5; // pixels: narrower ones could neither be seen nor clicked

/** Draw rows one below the other; returns the scale. `isOn(row, bucket)`: it is selected. */
function chart(host, rows, [from, to], isOn = () => false) {
  const width = Math.max(host.clientWidth, 280);
  const left = Math.ceil(Math.max(...rows.map((row) => textWidth(row.label) + 12))), right = width - RIGHT;
  const x = (t) => left + ((t - from) / (to - from)) * (right - left);
  const t = (place) => from + ((place - left) / (right - left)) * (to - from);
  const scale = { left, right, from, to, x, t };
  const height = placeRows(rows), clip = `clip-${host.id}`;
  const outside = rows.map((row) => [
    svg("text.strong", { x: 0, y: row.top + BAR / 2 + 4 }, row.label),
    row.heading && svg("text.strong", { x: 0, y: row.top - 12 }, row.heading),
  ]);
  const inside = rows.map((row) => [computing(row, scale), gradients(row, scale, isOn), sending(row, scale, isOn)]);
  host.replaceChildren(svg("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("clipPath", { id: clip }, svg("rect", { x: left - 2, y: 0, width: right - left + 6, height })),
    axis(scale, height), outside.flat().filter(Boolean), svg("g", { "clip-path": `url(#${clip})` }, inside)));
  return scale;
}

/** Give each row its `top`; returns the height of all. */
function placeRows(rows) {
  let y = AXIS;
  for (const row of rows) {
    row.top = y + (row.heading ? HEADING : 0);
    y = row.top + ROW + BETWEEN;
  }
  return y - BETWEEN + 6;
}

function axis({ x, from, to, left, right }, height) {
  const distance = roundDistance((to - from) / Math.max(2, (right - left) / 70));
  const digits = Math.max(0, -Math.floor(Math.log10(distance)));
  const marks = [];
  for (let k = Math.ceil(from / distance - 1e-9); k * distance <= to + 1e-9; k++) {
    const at = x(k * distance);
    const isLast = (k + 1) * distance > to + 1e-9;
    const label = `${(k * distance).toFixed(digits)}${isLast ? " ms" : ""}`;
    marks.push(
      svg("line.grid", { x1: at, x2: at, y1: AXIS - 6, y2: height }),
      svg("text.soft", { x: at, y: 12, "text-anchor": at > right - 30 ? "end" : "middle" }, label));
  }
  return svg("g", marks);
}

/** 1, 2 or 5 times a power of ten, and at least `rough`. */
function roundDistance(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((distance) => distance >= rough);
}

// ---------------------------------------------------------------------- above: what the rank computes

const nameOf = (activity) => (activity === "exposed communication" ? "stands still" : activity);

/** The names of an activity's colours, which `page.css` defines. */
const COLORS = { loss: "quiet", "copy back": "quiet", buffers: "forward", rebuild: "forward" };
const colorOf = (activity) => (activity === ACTIVITIES[STILL] ? "exposed" : COLORS[activity] ?? activity);

function computing(row, scale) {
  const end = row.backwardEnd === null ? null : scale.x(row.backwardEnd);
  return [
    ...row.spans.map((span) => spanParts(row, span, scale)),
    end !== null && svg("line.rule", { x1: end, x2: end, y1: row.top - 5, y2: row.top + ROW + 4 }),
  ];
}

function spanParts(row, [kind, begin, end, bucket], scale) {
  const activity = ACTIVITIES[kind], isStill = kind === STILL;
  const [left, right] = [scale.x(begin), scale.x(end)];
  const width = Math.max(0.6, right - left - (right - left > 4 ? 1 : 0));
  const style = isStill ? null : `fill:var(--${colorOf(activity)})`;
  const about = [
    `${nameOf(activity)}, ${row.label}`,
    `${ms(end - begin)}, from ${ms(begin)} on`,
    bucket >= 0 && `${isStill ? "for " : ""}bucket ${bucket}`,
  ];
  const rect = svg(`rect.${activity.replaceAll(" ", "-")}`, { x: left, y: row.top, width, height: BAR, style },
    tip(about));
  const [texts, color] = isStill ? [["stands still", "waits"], "exposed"] : [[activity], `on-${colorOf(activity)}`];
  return [rect, ...fitted(texts, left, right, scale, row.top + BAR / 2 + 4, color)];
}

/** What a browser shows of an element under the mouse. */
const tip = (lines) => svg("title", present(lines).join("\n"));

/** The first of the texts that has room in the visible part between two places, in a colour of `page.css`. */
function fitted(texts, begin, end, scale, y, color) {
  const [left, right] = [Math.max(begin, scale.left), Math.min(end, scale.right)];
  const text = texts.find((candidate) => textWidth(candidate) + 12 < right - left);
  if (text === undefined) return [];
  const style = `fill:var(--${color})`;
  return [svg("text.label", { x: (left + right) / 2, y, "text-anchor": "middle", style }, text)];
}

/** A tick for each gradient; those of the selected bucket are longer. As paths: there may be thousands. */
function gradients(row, { x }, isOn) {
  const selected = row.buckets.filter((bucket) => isOn(row, bucket));
  const on = new Set(selected.flatMap((bucket) => row.layout.buckets[bucket.index].params));
  const ticks = (wanted, length) => row.ready.filter(([param]) => on.has(param) === wanted)
    .map(([, t]) => `M${x(t).toFixed(1)} ${row.top + TICKS_TOP}v${length}`).join("");
  return [svg("path.tick", { d: ticks(false, TICKS - 3) }), svg("path.tick.on", { d: ticks(true, TICKS) })];
}

// ---------------------------------------------------------------------- below: buckets on their way

const stretchClass = (moves, exposed) => `${moves ? "moves" : "waits"}${exposed ? "-exposed" : ""}`;

function sending(row, scale, isOn) {
  const { left, right } = scale, y = row.top + LANE_TOP;
  const drawn = row.buckets.filter((bucket) => bucket.stretches.length);
  const selectedLast = drawn.sort((a, b) => isOn(row, a) - isOn(row, b)); // no other lies on its outline
  return [
    svg("rect.lane", { x: left, y, width: right - left, height: LANE }),
    ...selectedLast.map((bucket) => {
      const shapes = bucketShapes(bucket, y, scale, isOn(row, bucket));
      const attributes = { "data-bucket": bucket.index, onclick: () => row.pick?.(bucket.index) };
      return svg("g.bucket", attributes, tip(bucketFacts(row, bucket)), shapes, bucketText(row, bucket, scale));
    }),
  ];
}

function bucketShapes({ stretches }, y, { x }, isOn) {
  const begin = x(stretches[0][0]), end = Math.max(x(stretches.at(-1)[1]), begin + LEAST_BUCKET);
  const shapes = stretches.map(([from, to, moves, exposed], k) => {
    const until = k === stretches.length - 1 ? end - (end - begin > 5 ? 1 : 0) : x(to);
    return svg(`rect.${stretchClass(moves, exposed)}`, { x: x(from), y, width: until - x(from), height: LANE });
  });
  const outline = { x: begin - 1, y: y - 1, width: end - begin + 2, height: LANE + 2 };
  return [shapes, isOn && svg("rect.outline", outline)];
}

/** The bucket's number, and its size where there is room, in its longest stretch on the wire. */
function bucketText(row, bucket, scale) {
  const seen = ([begin, end]) => Math.min(scale.x(end), scale.right) - Math.max(scale.x(begin), scale.left);
  const [stretch] = bucket.stretches.filter(([, , moves]) => moves).sort((a, b) => seen(b) - seen(a));
  if (!stretch) return [];
  const size = bytes(row.layout.buckets[bucket.index].nbytes);
  const texts = [`bucket ${bucket.index}, ${size}`, `${bucket.index}: ${size}`, `${bucket.index}`];
  const [begin, end, , exposed] = stretch;
  const y = row.top + LANE_TOP + LANE / 2 + 4;
  return fitted(texts, scale.x(begin), scale.x(end), scale, y, exposed ? "on-exposed" : "on-wire");
}

function bucketFacts(row, { index, life = [] }) {
  const { nbytes, params } = row.layout.buckets[index];
  const size = params.length ? `${plural(params.length, "gradient")}, ${bytes(nbytes)}` : bytes(nbytes);
  return [`bucket ${index}, ${row.label}`, size, ...life.map(({ name, took }) => `${name} ${took}`)];
}
