// One bucket on one rank: its life stage by stage, and its gradients.

function renderBucket() {
  const bucket = selectedBucket();
  byId("bucket").hidden = !bucket;
  if (!bucket) return;
  const layout = layoutOf(state.exhibit), rank = selectedRank();
  const { nbytes, params } = layout.buckets[bucket.index];
  const place = `number ${bucket.index + 1} of ${layout.buckets.length} to leave`;
  fill("bucket-title", `Bucket ${bucket.index}, ${fullName(state.exhibit, rank)}`);
  fill("bucket-facts", `${bytes(nbytes)}, ${plural(params.length, "gradient")}; ${place}. ${bucket.stood}`);
  fill("bucket-life", life(bucket), gradientTable(bucket, rank, layout));
}

/** The stages of the bucket's life, each with a bar at its place in that life. */
function life({ life: stages }) {
  const edges = stages.flatMap((stage) => stage.stretches.flatMap(([from, to]) => [from, to]));
  const begin = Math.min(...edges), length = Math.max(...edges) - begin;
  const bar = ([from, to, moves, exposed], { name }) => {
    const place = `left:${(100 * (from - begin)) / length}%;width:${(100 * (to - from)) / length}%`;
    return html(`i.${name === "fills" ? name : stretchClass(moves, exposed)}`, { style: place });
  };
  return html("ol.life", stages.map((stage) => html("li",
    html("b", stage.name),
    html("span.lane", { "aria-hidden": "true" }, stage.stretches.map((stretch) => bar(stretch, stage))),
    html("span.took", stage.took),
    html("span.sentence", prose(stage.sentence)))));
}

/** The bucket's gradients in the order in which they arrived; last those that never did. */
function gradientTable(bucket, rank, layout) {
  const ready = new Map(rank.ready);
  const members = layout.buckets[bucket.index].params.map((p) => [...layout.params[p], ready.get(p) ?? Infinity]);
  const rows = members.sort(([, , a], [, , b]) => a - b)
    .map(([name, nbytes, t]) => [name, bytes(nbytes), t === Infinity ? "never" : ms(t)]);
  const region = { tabindex: 0, role: "region", "aria-label": "Gradients of the bucket" };
  return html("div.scroll.params", region, table(["gradient, as they arrive", "size", "ready at"], rows));
}
