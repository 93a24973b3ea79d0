// One bucket on one rank: its figures, its life stage by stage, its gradients.

function renderBucket() {
  const bucket = state.bucket === null ? undefined : selectedBucket();
  byId("bucket").hidden = !bucket;
  if (!bucket) return;
  const layout = layoutOf(state.exhibit), rank = selectedRank();
  const { nbytes, params } = layout.buckets[bucket.index];
  const place = `number ${bucket.index + 1} of ${layout.buckets.length} to leave`;
  const about = `${bytes(nbytes)}, ${plural(params.length, "gradient")}; ${place}`;
  const gradients = gradientsOf(bucket, rank, layout);
  fill("bucket",
    html("h2", { id: "bucket-title" }, `Bucket ${bucket.index}, ${fullName(state.exhibit, rank)} `,
      html("span.aside", about)),
    html("dl.figures", bucketFigures(bucket, rank, gradients).map((parts) => figure(...parts))),
    html("div.two", life(bucket), gradientTable(gradients)));
}

const figure = (name, value, about, kind = "dd") =>
  html("div", html("dt", name), html(kind, value), html("dd.about", about));

/** Each figure as its name, its value, a remark and its class. */
function bucketFigures({ lastRank, behind: [held, queued], wire, awaited }, rank, gradients) {
  const last = gradients.findLast(([, , t]) => t !== undefined);
  const behind = `${ms(held)} to leave, ${ms(queued)} for the wire`;
  return [
    ["Last gradient", ...(last ? [tail(last[0]), `ready at ${ms(last[2])}`] : ["none", "no gradient arrived"])],
    ["Last rank to launch", ...lastRankFigure(lastRank, rank)],
    ["Waited for buckets before it", ms(held + queued), isNotable(held + queued) ? behind : "none was in its way"],
    ...(wire ? wireFigures(wire, awaited, rank) : [["On the wire", "not known", "it never arrived"]]),
  ];
}

function lastRankFigure(last, rank) {
  if (last === null) return ["not known", "not all ranks were recorded"];
  const [number, later] = last;
  if (number === rank.rank) return ["this rank", "no other came later"];
  return [`rank ${number}`, isNotable(later) ? `${ms(later)} after this one` : "and all others with it"];
}

function wireFigures({ hidden, beside, exposed }, awaited, { rank }) {
  const elsewhere = isNotable(beside) ? `, ${ms(beside)} beside other work` : "";
  const about = `of ${ms(hidden + beside + exposed)} on the wire${elsewhere}`;
  const stood = isNotable(awaited) ? `stood still for it for ${ms(awaited)}` : "did not stand still for it";
  return [
    ["Hidden by backward", ms(hidden), about, isNotable(hidden) ? "dd.good" : "dd"],
    ["Exposed", ms(exposed), `rank ${rank} ${stood}`, isNotable(exposed) ? "dd.bad" : "dd"],
  ];
}

/** The stages of the bucket's life, each with a bar at its place in that life. */
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
function gradientsOf(bucket, rank, layout) {
  const ready = new Map(rank.ready);
  const members = layout.buckets[bucket.index].params.map((p) => [...layout.params[p], ready.get(p)]);
  return members.sort(([, , a], [, , b]) => (a ?? Infinity) - (b ?? Infinity));
}

function gradientTable(gradients) {
  const rows = gradients.map(([name, nbytes, t]) => [tail(name), bytes(nbytes), t === undefined ? "never" : ms(t)]);
  const region = { tabindex: 0, role: "region", "aria-label": "Gradients of the bucket" };
  return html("div.scroll.params", region, table(["gradient, as they arrive", "size", "ready at"], rows));
}
