// One bucket on one rank: its life stage by stage.

function renderBucket() {
  const bucket = selectedBucket();
  byId("bucket").hidden = !bucket;
  if (!bucket) return;
  const layout = layoutOf(state.exhibit);
  const { size, params } = layout[bucket.index];
  const order = `number ${bucket.index + 1} of ${layout.length} to leave`;
  const place = `${alone ? "" : `${exhibits[state.exhibit].title}, `}rank ${selectedRank().rank}`;
  const owner = bucket.module === "" ? "" : ` of ${bucket.module}`;
  fill("bucket-title", `Bucket ${bucket.index}${owner}, ${place}`);
  fill("bucket-facts", `${size}, ${plural(params.length, "gradient")}; ${order}. ${bucket.stood}`);
  fill("bucket-life", bucket.life.map(({ name, took, sentence }) =>
    html("li", html("b", name), html("span.took", took), html("span.sentence", prose(sentence)))));
}
