// Ranks' rows on one axis of time, as an SVG. Times are milliseconds.
//
// A row has a label and a sublabel, perhaps a heading and a note above; `spans` [activity, begin, end, bucket],
// which tile the rank's step; `ready` [param, time]; `backwardEnd`; a `layout`; and `buckets`. A bucket has an
// index, lastGradient, launched, and stretches [begin, end, moves, exposed]: its bytes move or it waits for other
// ranks, and its own rank stands still meanwhile or does not.
//
// Colour is cost: green is hidden behind computation, red is exposed. Texture: solid moves, hatched waits.

const BAR = 30, TICKS = 12, LANE = 26, GAP = 4, BETWEEN = 20, AXIS = 26, HEADING = 30, RIGHT = 10; // pixels
const TICKS_TOP = BAR + 3, LANE_TOP = TICKS_TOP + TICKS + GAP, ROW = LANE_TOP + LANE;
const LEAST_BUCKET = 2.5; // pixels: narrower ones could neither be seen nor clicked

/** Draw rows one below the other; returns the scale. `isOn(row, bucket)`: it is selected. */
function chart(host, rows, [from, to], isOn = () => false) {
  const width = Math.max(host.clientWidth, 280);
  const scale = scaleFor(rows, width, from, to);
  const height = placeRows(rows);
  const { left, right } = scale, clip = `clip-${host.id}`;
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  const picture = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("clipPath", { id: clip }, svg("rect", { x: left - 2, y: 0, width: right - left + 6, height })),
    axis(scale, height), inside);
  for (const row of rows) {
    picture.append(...labels(row, scale));
    inside.append(...computing(row, scale), ...gradients(row, scale, isOn), ...sending(row, scale, isOn));
  }
  for (const row of rows) inside.append(...arrows(row, scale, isOn));
  host.replaceChildren(picture);
  return scale;
}

function scaleFor(rows, width, from, to) {
  const isNarrow = width < 620;
  const left = Math.ceil(Math.max(isNarrow ? 0 : 86, ...rows.map((row) => textWidth(row.label, 600) + 12)));
  const right = width - RIGHT;
  return {
    left, right, from, to, isNarrow,
    x: (t) => left + ((t - from) / (to - from)) * (right - left),
    t: (x) => from + ((x - left) / (right - left)) * (to - from),
  };
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

function axis({ x, from, to, left, right, isNarrow }, height) {
  const distance = roundDistance((to - from) / Math.max(2, (right - left) / (isNarrow ? 50 : 90)));
  const digits = Math.max(0, -Math.floor(Math.log10(distance)));
  const marks = [];
  for (let k = Math.ceil(from / distance - 1e-9); k * distance <= to + 1e-9; k++) {
    const at = x(k * distance);
    const isLast = (k + 1) * distance > to + 1e-9;
    const label = `${(k * distance).toFixed(digits)}${isLast ? " ms" : ""}`;
    marks.push(
      svg("line.grid", { x1: at, x2: at, y1: AXIS - 6, y2: height }),
      svg("text.soft.small", { x: at, y: 12, "text-anchor": at > right - 30 ? "end" : "middle" }, label));
  }
  return svg("g", marks);
}

/** 1, 2 or 5 times a power of ten, and at least `rough`. */
function roundDistance(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((distance) => distance >= rough);
}

function labels(row, { isNarrow }) {
  const text = (y, classes, ...content) => svg(`text.${classes}`, { x: 0, y: row.top + y }, ...content);
  const note = row.heading && svg("tspan.soft", { dx: 10, "font-weight": 400 }, row.note);
  return present([
    text(isNarrow ? BAR / 2 + 4 : 13, "strong", row.label),
    !isNarrow && text(27, "soft.small", row.sublabel),
    !isNarrow && text(LANE_TOP + LANE / 2 + 4, "soft.small", "sends"),
    row.heading && text(-12, "strong", row.heading, note),
  ]);
}

// ---------------------------------------------------------------------- above: what the rank computes

const nameOf = (activity) => (activity === "exposed communication" ? "stands still" : activity);

/** The names of an activity's colours, which `page.css` defines. */
const COLORS = { loss: "quiet", "copy back": "quiet", buffers: "forward", rebuild: "forward" };
const colorOf = (activity) => (activity === ACTIVITIES[STILL] ? "exposed" : COLORS[activity] ?? activity);

function computing(row, scale) {
  const { x } = scale;
  const inView = ([, begin, end]) => x(end) >= scale.left && x(begin) <= scale.right && x(end) - x(begin) > 0.15;
  const parts = row.spans.filter(inView).flatMap((span) => spanParts(row, span, scale));
  if (row.backwardEnd !== null) {
    const at = x(row.backwardEnd);
    parts.push(svg("line.rule", { x1: at, x2: at, y1: row.top - 5, y2: row.top + ROW + 4 }));
  }
  return parts;
}

function spanParts(row, [kind, begin, end, bucket], scale) {
  const activity = ACTIVITIES[kind], isStill = kind === STILL;
  const [left, right] = [scale.x(begin), scale.x(end)];
  const width = Math.max(0.6, right - left - (right - left > 4 ? 1 : 0));
  const style = isStill ? null : `fill:var(--${colorOf(activity)})`;
  const bar = { x: left, y: row.top, width, height: BAR, rx: width > 6 ? 3 : 0, style };
  const rect = svg(`rect.${activity.replaceAll(" ", "-")}`, bar);
  rect.tip = () => [
    `${nameOf(activity)}, ${row.label}`,
    `${ms(end - begin)}, from ${ms(begin)} on`,
    bucket >= 0 ? `${isStill ? "for " : ""}bucket ${bucket}` : "",
  ];
  const [texts, color] = isStill ? [["stands still", "waits"], "exposed"] : [[activity], `on-${colorOf(activity)}`];
  return [rect, ...fitted(texts, left, right, scale, row.top + BAR / 2 + 4, color)];
}

/** The first of the texts that has room in the visible part between two places, in a colour of `page.css`. */
function fitted(texts, begin, end, scale, y, color) {
  const [left, right] = [Math.max(begin, scale.left), Math.min(end, scale.right)];
  const weight = color.includes("exposed") ? 600 : 400;
  const text = texts.find((candidate) => textWidth(candidate, weight) + 12 < right - left);
  if (text === undefined) return [];
  const style = `fill:var(--${color});font-weight:${weight}`;
  return [svg("text.label", { x: (left + right) / 2, y, "text-anchor": "middle", style }, text)];
}

/** A tick for each gradient; those of the selected bucket are longer. As paths: there may be thousands. */
function gradients(row, { x, left, right }, isOn) {
  const y = row.top + TICKS_TOP;
  const selected = row.buckets.filter((bucket) => isOn(row, bucket));
  const on = new Set(selected.flatMap((bucket) => row.layout.buckets[bucket.index].params));
  let [faint, strong, last] = ["M0 0", "M0 0", -1];
  for (const [param, t] of row.ready) {
    const at = x(t);
    if (at < left - 1 || at > right + 1) continue;
    if (on.has(param)) strong += `M${at.toFixed(1)} ${y}v${TICKS}`;
    else if (at - last > 0.4) {
      faint += `M${at.toFixed(1)} ${y}v${TICKS - 3}`;
      last = at;
    }
  }
  return [svg("path.tick", { d: faint }), svg("path.tick.on", { d: strong })];
}

// ---------------------------------------------------------------------- below: buckets on their way

const stretchClass = (moves, exposed) => `${moves ? "moves" : "waits"}${exposed ? "-exposed" : ""}`;

function sending(row, scale, isOn) {
  const { left, right } = scale;
  const lane = svg("rect.lane", { x: left, y: row.top + LANE_TOP, width: right - left, height: LANE, rx: 3 });
  const buckets = row.buckets.filter((bucket) => bucket.stretches.length);
  return [
    lane,
    ...buckets.map((bucket) => bucketGroup(row, bucket, scale)),
    ...buckets.filter((bucket) => isOn(row, bucket)).map((bucket) => outline(row, bucket, scale)),
    ...buckets.flatMap((bucket) => bucketText(row, bucket, scale)),
  ];
}

/** From where to where a bucket is drawn. */
function extent({ stretches }, { x }) {
  const begin = x(stretches[0][0]);
  return [begin, Math.max(x(stretches.at(-1)[1]), begin + LEAST_BUCKET)];
}

function bucketGroup(row, bucket, scale) {
  const y = row.top + LANE_TOP;
  const [begin, end] = extent(bucket, scale);
  const shapes = bucket.stretches.map(([from, to, moves, exposed], k) => {
    const until = k === bucket.stretches.length - 1 ? end : scale.x(to);
    const place = { x: scale.x(from), y, width: until - scale.x(from), height: LANE };
    return svg(`rect.${stretchClass(moves, exposed)}`, place);
  });
  const seam = end - begin > 5 && svg("line.seam", { x1: end, x2: end, y1: y, y2: y + LANE });
  const group = svg("g.bucket", { "data-bucket": bucket.index }, shapes, seam);
  group.pick = () => row.pick?.(bucket.index);
  group.tip = () => bucketTip(row, bucket);
  return group;
}

function outline(row, bucket, scale) {
  const [begin, end] = extent(bucket, scale);
  const y = row.top + LANE_TOP - 1;
  return svg("rect.outline", { x: begin - 1, y, width: end - begin + 2, height: LANE + 2, rx: 3 });
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

function bucketTip(row, bucket) {
  const { nbytes, params } = row.layout.buckets[bucket.index];
  const lasting = (wanted) => sum(bucket.stretches.filter(wanted).map(([begin, end]) => end - begin));
  const waits = lasting(([, , moves]) => !moves);
  const moves = lasting(([, , moving]) => moving);
  const exposed = lasting(([, , moving, isExposed]) => moving && isExposed);
  return [
    `bucket ${bucket.index}, ${row.label}`,
    params.length ? `${plural(params.length, "gradient")}, ${bytes(nbytes)}` : bytes(nbytes),
    isNotable(waits) ? `${ms(waits)} waiting for other ranks` : "",
    `${ms(moves)} on the wire, ${ms(exposed)} of it exposed`,
  ];
}

/** From the last gradient of the selected bucket to its launch. */
function arrows(row, { x }, isOn) {
  const selected = row.buckets.filter((bucket) => isOn(row, bucket) && bucket.lastGradient != null);
  return selected.flatMap((bucket) => {
    const [from, to] = [x(bucket.lastGradient), x(bucket.launched)];
    const [top, bottom] = [row.top + TICKS_TOP + TICKS, row.top + LANE_TOP];
    return [
      svg("path.arrow", { d: `M${from} ${top}C${from} ${bottom} ${to} ${top} ${to} ${bottom}` }),
      svg("circle.arrow-head", { cx: from, cy: top, r: 2.2 }),
    ];
  });
}
