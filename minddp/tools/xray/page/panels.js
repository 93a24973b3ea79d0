// The step in words and tables: the summary, which step it is, where it goes.

// ---------------------------------------------------------------------- the step as a whole

function renderSummary() {
  byId("setting").textContent = data.setting;
  byId("headline").textContent = alone ? stepOf(0).headline : "One step of each recording, on one scale";
  fill("sentences", alone && prose([...stepOf(0).sentences, exhibits[0].noise].join(" ")));
  fill("advice", exhibits[0].advice.map((sentence) => html("li", prose(sentence))));
  const facts = (e) => (alone ? e.facts : [`${e.title}:`, ...e.facts]);
  fill("facts", exhibits.map((e) => html("p", facts(e).join(" "))));
}

// ---------------------------------------------------------------------- which step

/** A bar for each step: as high as it is long, red as far as communication costs. */
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
    style: `--height:${(step.length / most).toFixed(3)};--exposed-share:${percent(step.exposed / step.length)}`,
    "aria-pressed": `${k === shown}`,
    "aria-label": `Step ${step.number}, ${ms(step.length)}`,
    title: `step ${step.number}: ${ms(step.length)}, communication costs ${ms(step.exposed)}`,
    onclick: () => turnTo(k),
  })));
}

// ---------------------------------------------------------------------- where the step goes

/** A table for each recording, with a column for each rank. */
function renderParts() {
  const region = { tabindex: 0, role: "region", "aria-label": "Where the step goes" };
  fill("parts",
    html("h2", { id: "parts-title" }, "Where the step goes"),
    exhibits.map((_, e) => html("div.scroll", region, partsTable(e))),
    html("p.soft", "A step lasts from the beginning of a forward to that of the next. Hidden is the share of the " +
      "communication for which the rank did not stand still. For a late rank: how much longer a rank stands still than " +
      "the one that ends backward last. Other is all that has no event: logging, zero_grad, pauses of the script."));
}

function partsTable(e) {
  const { ranks, table } = stepOf(e);
  const swatch = (activity) => html("i.swatch", { style: `background:var(--${colorOf(activity)})` });
  const heads = [alone ? "" : exhibits[e].title, ...ranks.map(({ rank }) => `rank ${rank}`)];
  return html("table",
    html("thead", html("tr", heads.map((head) => html("th", { scope: "col" }, head)))),
    html("tbody", table.map(([label, kind, ...times]) => html("tr",
      html("td", html("span", kind !== null && swatch(ACTIVITIES[kind]), label)),
      times.map((time) => html("td", time))))));
}
