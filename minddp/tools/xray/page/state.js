// The data from `payload.py`, and the reader's choices. Times are milliseconds from the beginning of their step.

const data = JSON.parse(byId("data").textContent);
const exhibits = data.exhibits; // one for each recording
const alone = exhibits.length === 1;

const state = {
  steps: exhibits.map((exhibit) => exhibit.typical), // for each exhibit, the index of the step shown
  exhibit: 0,
  rank: 0, // an index into the step's ranks
  bucket: null, // its number; null if there is none to choose
  zoom: 1, // how many times as wide as the window the step is drawn
};

const stepOf = (e) => exhibits[e].steps[state.steps[e]];
const layoutOf = (e) => exhibits[e].layouts[stepOf(e).layout];
const selectedRank = () => stepOf(state.exhibit).ranks[state.rank];
const selectedBucket = () => selectedRank().buckets.find((bucket) => bucket.index === state.bucket);

/** Select the bucket that costs most. */
function selectWorst() {
  const step = stepOf(0);
  const [number, bucket] = step.worst ?? [step.ranks[0].rank, step.ranks[0].buckets.at(-1)?.index ?? null];
  const rank = step.ranks.findIndex((candidate) => candidate.rank === number);
  Object.assign(state, { exhibit: 0, rank, bucket, zoom: 1 });
}
