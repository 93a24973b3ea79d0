// The step in words and tables: the summary, which step it is, where it goes; and the comparison of several.

// ---------------------------------------------------------------------- the step as a whole

function renderSummary() {
  const most = Math.max(...exhibits.map((_, e) => stepOf(e).length));
  byId("setting").textContent = data.setting;
  byId("headline").textContent = alone ? stepOf(0).headline : "One step of each recording, on one scale";
  fill("sentences", alone && prose(stepOf(0).sentences.join(" ")));
  fill("comparison", !alone && exhibits.map(({ title }, e) =>
    html("div.plan", lengthCells(title, layoutOf(e).buckets.length, stepOf(e).length, exposedIn(stepOf(e)), most))));
  const facts = (e) => (alone ? e.facts : [`${e.title}:`, ...e.facts]);
  fill("facts", exhibits.map((e) => html("p", facts(e).join(" "))));
}

/** A step's length as a bar, of which the exposed part is red; `most` is the longest on the same scale. */
function lengthCells(name, buckets, length, exposed, most) {
  const part = (value, color) =>
    html("i", { style: `width:${((100 * value) / most).toFixed(2)}%;background:var(--${color})` });
  return [
    html("span", name),
    html("span.buckets.soft", plural(buckets, "bucket")),
    html("span.track", { "aria-hidden": "true" }, part(length - exposed, "quiet"), part(exposed, "exposed")),
    html("b.time", ms(length)),
  ];
}

// ---------------------------------------------------------------------- which step

/** A bar for each step: as high as it is long, red as far as a rank stands still in it. */
function renderSteps() {
  const { steps, typical } = exhibits[0];
  const shown = state.steps[0];
  const most = Math.max(...steps.map((step) => step.length));
  byId("steps").hidden = byId("step-keys").hidden = !alone || steps.length < 2;
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

/** A table for each recording, with a column for each rank. */
function renderParts() {
  const region = { tabindex: 0, role: "region", "aria-label": "Where the step goes" };
  fill("parts",
    html("h2", { id: "parts-title" }, "Where the step goes"),
    exhibits.map((_, e) => [html("div.scroll", region, partsTable(e)), causesOf(e)]),
    html("p.soft", "A step lasts from the beginning of a forward to that of the next. Hidden: the share of the " +
      "communication for which the rank did not stand still."));
}

function partsTable(e) {
  const { ranks } = stepOf(e);
  const shown = [...ACTIVITIES.keys()].filter((kind) => ranks.some(({ parts }) => isNotable(parts[kind])));
  const swatch = (activity) => html("i.swatch", { style: `background:var(--${colorOf(activity)})` });
  return table([alone ? "" : exhibits[e].title, ...ranks.map(({ rank }) => `rank ${rank}`)], [
    ...shown.map((kind) => [
      html("span", swatch(ACTIVITIES[kind]), nameOf(ACTIVITIES[kind])),
      ...ranks.map(({ parts }) => ms(parts[kind])),
    ]),
    [html("b", "a step"), ...ranks.map(({ length }) => html("b", ms(length)))],
    ["hidden", ...ranks.map(({ overlap }) => percent(overlap))],
  ]);
}

/** The causes for which the rank that stands still longest does so. */
function causesOf(e) {
  const rank = stillest(stepOf(e));
  const causes = rank.causes.filter(([, value]) => isNotable(value));
  const listed = causes.flatMap(([cause, value]) => [", ", html("b", ms(value)), ` (${cause})`]).slice(1);
  const name = alone ? `Rank ${rank.rank}` : fullName(e, rank);
  return causes.length > 0 && html("p.causes", `${name} stands still longest: `, listed, ".");
}
