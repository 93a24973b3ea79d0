// Everything around the timeline, in words and tables.

/** The headline, the advice, and the facts about the recording. */
function renderSummary() {
  const [{ advice, whatIfs, model, noise }] = exhibits;
  byId("setting").textContent = data.setting;
  byId("headline").textContent = alone ? stepOf(0).headline : "One step of each recording, on one scale";
  fill("sentences", alone && prose([...stepOf(0).errors, noise].join(" ")));
  const items = (sentences) => sentences.map((sentence) => html("li", prose(sentence)));
  fill("advice", items(advice));
  byId("what-ifs").hidden = whatIfs.length === 0;
  fill("what-if-list", items(whatIfs));
  fill("model", model.map((sentence, k) => html(k ? "p.warning" : "p.soft", sentence)));
  const facts = (e) => (alone ? e.facts : [`${e.title}:`, ...e.facts]);
  fill("facts", exhibits.map((e) => html("p", prose(facts(e).join(" ")))));
}

/** A bar for each step: its height is the length, the red part is the exposed communication. */
function renderSteps() {
  const { steps, typical } = exhibits[0], shown = state.steps[0];
  const most = Math.max(...steps.map((step) => step.length));
  byId("steps").hidden = byId("step-keys").hidden = !alone || steps.length < 2;
  const about = shown === typical ? `the median of ${steps.length}` : ms(steps[shown].length);
  byId("step-label").textContent = `Step ${steps[shown].number}, ${about}`;
  byId("step-before").disabled = shown === 0;
  byId("step-after").disabled = shown === steps.length - 1;
  fill("strip", steps.map((step, k) => html("button", {
    type: "button",
    tabindex: -1, // the keyboard goes to the step before or after
    style: `--height:${(step.length / most).toFixed(3)};--exposed-share:${(step.exposed / step.length).toFixed(3)}`,
    "aria-pressed": `${k === shown}`,
    "aria-label": `Step ${step.number}, ${ms(step.length)}`,
    title: `step ${step.number}: ${ms(step.length)}, exposed communication ${ms(step.exposed)}`,
    onclick: () => turnTo(k),
  })));
}

/** The history of the selected bucket on the selected rank. */
function renderBucket() {
  const bucket = selectedBucket();
  byId("bucket").hidden = !bucket;
  if (!bucket) return;
  const layout = layoutOf(state.exhibit), { size, params } = layout[bucket.index];
  const place = `${alone ? "" : `${exhibits[state.exhibit].title}, `}rank ${selectedRank().rank}`;
  const owner = bucket.module === "" ? "" : ` of ${bucket.module}`;
  fill("bucket-title", `Bucket ${bucket.index}${owner}, ${place}`);
  fill("bucket-facts", `${size}, ${plural(params.length, "gradient")}; number ${bucket.index + 1} of ${layout.length} ` +
    `to leave. It blocks rank ${selectedRank().rank} for ${bucket.awaited}.`);
  fill("bucket-stages", bucket.stages.map(([name, took, note]) =>
    html("tr", html("td", name), html("td", took), html("td", prose(note)))));
}

/** A table for each recording, with a column for each rank. */
function renderParts() {
  fill("parts-tables", exhibits.map(({ title }, e) => {
    const { ranks, table } = stepOf(e);
    const swatch = (kind) => html("i.swatch", { style: `background:var(--${data.activities[kind][1]})` });
    const heads = [alone ? "" : title, ...ranks.map(({ rank }) => `rank ${rank}`)];
    return html("div.scroll", { tabindex: 0, role: "region", "aria-label": "Where the step goes" }, html("table",
      html("thead", html("tr", heads.map((head) => html("th", { scope: "col" }, head)))),
      html("tbody", table.map(([label, kind, ...cells]) => html("tr",
        html("td", html("span", kind !== null && swatch(kind), label)), cells.map((cell) => html("td", cell)))))));
  }));
}

/** Draw the whole page, once and after each choice. */
function render() {
  for (const draw of [renderSummary, renderSteps, renderTimeline, renderBucket, renderParts]) draw();
}

selectWorst();
render();
listenToTimeline(byId("timeline"));
for (const button of document.querySelectorAll("[data-key]")) {
  button.addEventListener("click", () => KEYS[button.dataset.key]());
}
addEventListener("resize", renderTimeline); // the axis has room for more marks, or fewer
