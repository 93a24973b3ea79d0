// The step in words and tables: the summary, which step it is, where it goes; and the comparison of several.

const isNarrow = () => innerWidth < 760;

// ---------------------------------------------------------------------- the step as a whole

function renderSummary() {
  const [exhibit] = exhibits;
  byId("setting").textContent = data.setting;
  byId("headline").textContent = alone ? stepOf(0).headline : comparisonHeadline();
  fill("sentences", prose(alone ? stepOf(0).sentences.join(" ") : COMPARISON_LEAD));
  byId("suggestion").hidden = !showsTypical() || !exhibit.suggestion;
  fill("suggestion", html("b", "What to try:"), prose(exhibit.suggestion));
  byId("comparison").hidden = alone;
  fill("comparison", !alone && comparisonTable());
  const facts = (e) => (alone ? e.facts : [`${e.title}:`, ...e.facts]);
  fill("facts", exhibits.map((e) => html("ul", facts(e).map((fact) => html("li", fact)))));
}

const COMPARISON_LEAD =
  "Recordings on one scale, each by its step of median length. Compare what is red: then a rank stands still.";

function comparisonHeadline() {
  const ordered = exhibits.map((_, e) => e).sort((a, b) => stepOf(a).length - stepOf(b).length);
  const [first, last] = [ordered[0], ordered.at(-1)].map((e) => [exhibits[e].title, ms(stepOf(e).length)]);
  return `${first.join(" takes ")} a step, ${last.join(" ")}.`;
}

function comparisonTable() {
  const most = Math.max(...exhibits.map((_, e) => stepOf(e).length));
  const rows = exhibits.map((exhibit, e) => {
    const { buckets } = layoutOf(e);
    const step = stepOf(e);
    const least = Math.min(...step.ranks.map((rank) => rank.overlap));
    return [
      exhibit.title,
      lengthBar(step.length, exposedIn(step), most),
      html("b", ms(step.length)),
      ms(exposedIn(step)),
      percent(least),
      buckets.length,
      bytes(sum(buckets.map((bucket) => bucket.nbytes))),
    ];
  });
  return table(["", "", "a step", "stands still", "hidden", "messages", "bytes"], rows);
}

/** A step's length, of which the exposed part is red; on one scale with others, the longest of which is `most`. */
function lengthBar(length, exposed, most) {
  const part = (value, color) =>
    html("i", { style: `width:${((100 * value) / most).toFixed(2)}%;background:var(--${color})` });
  return html("span.track", { "aria-hidden": "true" }, part(length - exposed, "quiet"), part(exposed, "exposed"));
}

function table(heads, rows) {
  return html("table",
    html("thead", html("tr", heads.map((head) => html("th", { scope: "col" }, head)))),
    html("tbody", rows.map((cells) => html("tr", cells.map((cell) => html("td", cell))))));
}

// ---------------------------------------------------------------------- which step

const MANY_STEPS = 24; // these get a row of their own

/** A bar for each step: as high as it is long, red as far as a rank stands still in it. */
function renderSteps() {
  const { steps, typical } = exhibits[0];
  const shown = state.steps[0];
  const most = Math.max(...steps.map((step) => step.length));
  byId("steps").hidden = byId("step-keys").hidden = !alone || steps.length < 2;
  byId("steps").classList.toggle("many", steps.length > MANY_STEPS);
  const about = shown === typical ? `the median of ${steps.length}` : ms(steps[shown].length);
  byId("step-label").textContent = `Step ${steps[shown].number}, ${about}`;
  byId("step-before").disabled = shown === 0;
  byId("step-after").disabled = shown === steps.length - 1;
  fill("strip", steps.map((step, k) => html("button", {
    type: "button",
    tabindex: -1, // the keyboard goes to the step before or after
    style: `--height:${(step.length / most).toFixed(3)};--exposed-share:${percent(exposedIn(step) / step.length)}`,
    "aria-pressed": `${k === shown}`,
    "aria-label": `Step ${step.number}, ${ms(step.length)}`,
    title: `step ${step.number}: ${ms(step.length)}, stands still for ${ms(exposedIn(step))}`,
    onclick: () => turnTo(k),
  })));
}

function renderKey() {
  const swatch = (...shapes) => svg("svg", { width: 20, height: 12, "aria-hidden": "true" }, shapes);
  const box = (classes, style = null) => swatch(svg(`rect.${classes}`, { width: 20, height: 12, style }));
  const activities = ["forward", "backward", "optimizer"];
  const entries = [
    ...activities.map((activity) => [box(activity, `fill:var(--${activity})`), activity]),
    [box("exposed-communication"), "stands still"],
    [swatch(svg("path.tick", { d: "M4 1v10M8 1v10M11 1v10M17 1v10" })), "a gradient is ready"],
    [box("moves"), "on the wire, hidden"],
    [box("moves-exposed"), "on the wire, exposed"],
    [box("waits"), "waits for other ranks"],
  ];
  fill("key", entries.map(([sign, text]) => html("li", sign, text)));
}

// ---------------------------------------------------------------------- where the step goes

/** A row for each rank; in a narrow window a column for each, and a table for each recording. */
function renderParts() {
  const all = exhibits.flatMap((_, e) => stepOf(e).ranks.map(({ parts }) => parts));
  const shown = [...ACTIVITIES.keys()].filter((kind) => all.some((parts) => isNotable(parts[kind])));
  const most = Math.max(...all.flat());
  const heads = (corner) => [corner, "step", ...shown.map((kind) => partHead(ACTIVITIES[kind])), "hidden"];
  const cells = (name, rank) => [
    name,
    html("b", ms(rank.length)),
    ...shown.map((kind) => partCell(rank.parts[kind], ACTIVITIES[kind], most)),
    percent(rank.overlap),
  ];
  const rowsOf = (e, nameOfRank) => stepOf(e).ranks.map((rank) => cells(nameOfRank(e, rank), rank));
  const shortName = (_, { rank }) => `rank ${rank}`;
  const tables = isNarrow()
    ? exhibits.map(({ title }, e) => transposed([heads(alone ? "" : title), ...rowsOf(e, shortName)]))
    : [[heads(""), ...exhibits.flatMap((_, e) => rowsOf(e, fullName))]];
  const region = { tabindex: 0, role: "region", "aria-label": "Where the step goes" };
  fill("parts",
    html("h2", { id: "parts-title" }, "Where the step goes"),
    tables.map(([head, ...rows]) => html("div.scroll", region, table(head, rows))),
    exhibits.map((_, e) => causesOf(e)),
    html("p.note", "A step lasts from the beginning of a forward to that of the next. Hidden: the share of the " +
      "communication for which the rank did not stand still."));
}

/** The causes for which the rank that stands still longest does so. */
function causesOf(e) {
  const longest = exposedIn(stepOf(e));
  const rank = stepOf(e).ranks.find(({ parts }) => parts[STILL] === longest);
  const causes = rank.causes.filter(([, value]) => isNotable(value));
  const listed = causes.flatMap(([cause, value]) => [", ", html("b", ms(value)), ` (${cause})`]).slice(1);
  const name = alone ? `Rank ${rank.rank}` : fullName(e, rank);
  return causes.length > 0 && html("p.causes", `${name} stands still longest: `, listed, ".");
}

const transposed = (rows) => rows[0].map((_, column) => rows.map((row) => row[column]));

const background = (activity) => `background:var(--${colorOf(activity)})`;

const partHead = (activity) => html("span", html("i.swatch", { style: background(activity) }), nameOf(activity));

function partCell(value, activity, most) {
  const style = `width:${((100 * value) / most).toFixed(1)}%;${background(activity)}`;
  return [ms(value), html("i.meter", { style })];
}
