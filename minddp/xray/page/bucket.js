// One bucket on one rank: its figures, its life stage by stage, its gradients.

function renderBucket() {
  const bucket = state.bucket === null ? undefined : selectedBucket();
  byId("bucket").hidden = !bucket;
  if (!bucket) return;
  const layout = layoutOf(state.exhibit), rank = selectedRank();
  const { nbytes, params } = layout.buckets[bucket.index];
  const recording = alone ? "" : `${exhibits[state.exhibit].title}, `;
  const place = `number ${bucket.index + 1} of ${layout.buckets.length} to leave`;
  const about = `${bytes(nbytes)}, ${plural(params.length, "gradient")}; ${place}`;
  const title = `Bucket ${bucket.index}, ${recording}rank ${rank.rank} `;
  fill("bucket",
    html("h2", { id: "bucket-title" }, title, html("span.aside", about)),
    html("p.verdict", prose(bucket.verdict)),
    bucketFigures(bucket, rank, layout),
    html("div.two", life(bucket), arrivals(bucket, rank, layout)));
}

/** The questions that one has about a bucket, each with its figure. */
function bucketFigures(bucket, rank, layout) {
  return html("dl.figures",
    figure("Last gradient", ...lastGradient(bucket, rank, layout)),
    figure("Last rank to launch", ...lastRank(bucket, rank)),
    figure("Waited for buckets before it", ...waitedBehind(bucket)),
    bucket.wire ? wireFigures(bucket, rank) : figure("On the wire", "not known", "it was never through"));
}

function wireFigures({ wire: { hidden, beside, exposed }, awaited }, rank) {
  const elsewhere = isNotable(beside) ? `, ${ms(beside)} beside other work` : "";
  const stood = `rank ${rank.rank} stood still for it for ${ms(awaited)}`;
  const about = `of ${ms(hidden + beside + exposed)} on the wire${elsewhere}`;
  return [
    figure("Hidden by backward", ms(hidden), about, isNotable(hidden) ? "dd.good" : "dd"),
    figure("Exposed", ms(exposed), isNotable(awaited) ? stood : `rank ${rank.rank} did not stand still for it`,
      isNotable(exposed) ? "dd.bad" : "dd"),
  ];
}

const figure = (name, value, about, kind = "dd") =>
  html("div", html("dt", name), html(kind, value), html("dd.about", about));

function lastGradient(bucket, rank, layout) {
  const ready = arrivalsOf(bucket, rank, layout).filter(([, , t]) => t !== undefined);
  if (!ready.length) return ["none", "no gradient arrived"];
  const [name, , t] = ready.at(-1);
  return [tail(name), `ready at ${ms(t)}`];
}

function lastRank({ lastRank: last }, rank) {
  if (last === null) return ["not known", "not all ranks were recorded"];
  const [number, later] = last;
  if (number === rank.rank) return ["this rank", "no other came later"];
  return [`rank ${number}`, isNotable(later) ? `${ms(later)} after this one` : "and all others with it"];
}

function waitedBehind({ behind: [held, queued] }) {
  const both = `${ms(held)} to leave, ${ms(queued)} for the wire`;
  return [ms(held + queued), isNotable(held + queued) ? both : "none was in its way"];
}

/** What befell the bucket, stage by stage, each with a bar where it lies in the bucket's life. */
function life(bucket) {
  const begin = bucket.life[0]?.begin ?? 0;
  const length = (bucket.life.at(-1)?.end ?? 0) - begin || 1;
  const bar = ([from, to, moves, exposed], { name }) => {
    const place = `left:${(100 * (from - begin)) / length}%;width:${(100 * (to - from)) / length}%`;
    return html(`i.${name === "fills" ? name : stretchClass(moves, exposed)}`, { style: place });
  };
  return html("ol.life", bucket.life.map((stage) => html("li",
    html("span.name", stage.name),
    html("span.lane", { "aria-hidden": "true" }, stage.stretches.map((stretch) => bar(stretch, stage))),
    html("span.took", stage.took),
    html("span.sentence", prose(stage.sentence)))));
}

/** The bucket's gradients as [name, size in bytes, when it was ready], in that order; undefined: it never was. */
function arrivalsOf(bucket, rank, layout) {
  const ready = new Map(rank.ready);
  const members = layout.buckets[bucket.index].params.map((p) => [...layout.params[p], ready.get(p)]);
  return members.sort(([, , a], [, , b]) => (a ?? Infinity) - (b ?? Infinity));
}

function arrivals(bucket, rank, layout) {
  const rows = arrivalsOf(bucket, rank, layout).map(([name, nbytes, t]) =>
    [tail(name), bytes(nbytes), t === undefined ? "never" : ms(t)]);
  const region = { tabindex: 0, role: "region", "aria-label": "Gradients of the bucket" };
  return html("div.scroll.params", region, table(["gradient, as they arrive", "size", "ready at"], rows));
}
