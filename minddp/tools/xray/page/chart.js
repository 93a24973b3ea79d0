// Ranks' rows on one axis of time. `page.css` places whatever has times, so the browser zooms.
//
// A row has a label, perhaps a heading above; `spans` [activity, begin, end, bucket], and of several modules the name,
// which tile the rank's step; `ready` [param, time]; `backwardEnds`; a `layout`; and `buckets`. A bucket has an index
// and stretches [begin, end, moves, exposed], without gaps: its bytes move or it waits for other ranks, and its own
// rank is blocked meanwhile or not.

const MARKS = 90; // pixels from one mark of the axis to the next, at least

/** Rows one below the other, up to `end`. `isOn(row, bucket)`: it is selected. */
function chart(rows, end, isOn) {
  const ranks = rows.map((row) => [
    row.heading && html("div.heading", row.heading),
    html("div.label", row.label),
    html("div.rank",
      html("div.computes", row.spans.map((span) => computing(row, span))),
      gradients(row, end, isOn),
      html("div.sends", row.buckets.filter((bucket) => bucket.stretches.length)
        .map((bucket) => sending(row, bucket, isOn(row, bucket)))),
      row.backwardEnds.filter((t) => t !== null).map((t) => html("i.rule", { style: at(t, t) }))),
  ]);
  const style = `--end:${end};width:${100 * state.zoom}%`;
  return html("div.chart", { style, "aria-hidden": "true" }, axis(end, state.zoom * byId("timeline").clientWidth), ranks);
}

const at = (begin, end) => `--from:${begin};--to:${end};`;

function axis(end, pixels) {
  const rough = (MARKS * end) / pixels, power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(distance)));
  const marks = Array.from({ length: Math.ceil(end / distance) }, (_, k) => k * distance);
  const fits = (t) => end - t > 0.7 * rough;
  return html("div.axis", marks.map((t) =>
    html("span.mark.soft", { style: at(t, t) }, fits(t) && `${t.toFixed(digits)} ms`)));
}

/** Text that shows only whole words that have room in the visible part of a box. */
const fitted = (words) => html("span.fitted", words.map((word) => word.replaceAll(" ", "\u00a0")).join(" "));

/** The text that a browser shows for an element under the mouse. */
const tip = (lines) => present(lines).join("\n");

/** A span of the upper row: work of the rank. */
function computing(row, [kind, begin, end, bucket, module = ""]) {
  const [activity, color] = data.activities[kind], isBlocked = color === "exposed";
  const fill = isBlocked ? "" : `background:var(--${color});color:var(--on-${color})`;
  const title = tip([
    present([activity, module !== "" && module, row.label]).join(", "),
    `${ms(end - begin)}, from ${ms(begin)} on`,
    bucket >= 0 && `${isBlocked ? "for " : ""}bucket ${bucket}`,
  ]);
  const style = at(begin, end) + fill;
  return html(`div.${isBlocked ? "blocked" : color}`, { style, title }, fitted([activity, module]));
}

/** A tick for each gradient; those of the selected bucket are longer. As paths: there may be thousands. */
function gradients(row, end, isOn) {
  const selected = row.buckets.filter((bucket) => isOn(row, bucket));
  const on = new Set(selected.flatMap((bucket) => row.layout[bucket.index].params));
  const ticks = (wanted, length) =>
    row.ready.filter(([param]) => on.has(param) === wanted).map(([, t]) => `M${t} 0v${length}`).join("");
  const node = html("div.gradients");
  node.innerHTML = `<svg viewBox="0 0 ${end} 1" preserveAspectRatio="none">
    <path class="tick" d="${ticks(false, 0.75)}"/><path class="tick on" d="${ticks(true, 1)}"/></svg>`;
  return node;
}

/** A bucket in the lower row. */
function sending(row, { index, stretches, stages }, isSelected) {
  const { size, params } = row.layout[index];
  const lengths = stretches.map(([begin, end, moves]) => (moves ? end - begin : 0));
  const longest = lengths.indexOf(Math.max(...lengths));
  const title = tip([
    `bucket ${index}, ${row.label}`,
    `${plural(params.length, "gradient")}, ${size}`,
    ...stages.map(([name, took]) => `${name} ${took}`),
  ]);
  const style = at(stretches[0][0], stretches.at(-1)[1]);
  const attributes = { style, title, "data-bucket": index, onclick: () => row.pick(index) };
  return html(`div.bucket${isSelected ? ".on" : ""}`, attributes, stretches.map(([begin, end, moves, exposed], k) =>
    html(`div.${moves ? "moves" : "waits"}${exposed ? "-exposed" : ""}`, { style: `flex-grow:${end - begin}` },
      k === longest && moves === 1 && fitted([`${index}`, `(${size})`]))));
}
