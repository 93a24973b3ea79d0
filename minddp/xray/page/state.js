// The data to show, as `payload.py` has decided, and the reader's choices.
// Times are milliseconds from the beginning of their step.

const data = JSON.parse(byId("data").textContent);
const ACTIVITIES = data.activities;
const STILL = ACTIVITIES.indexOf("exposed communication");
const exhibits = data.exhibits; // one for each recording
const alone = exhibits.length === 1;

const state = {
  steps: exhibits.map((exhibit) => exhibit.typical), // for each exhibit, the index of the step shown
  exhibit: 0,
  rank: 0, // an index into the step's ranks
  bucket: null, // its number; null if there is none to choose
  view: null, // [from, to], or null for the whole step
  allRanks: false,
  plan: 0,
};

const stepOf = (e) => exhibits[e].steps[state.steps[e]];
const layoutOf = (e) => exhibits[e].layouts[stepOf(e).layout];
const fullName = (e, { rank }) => `${alone ? "" : `${exhibits[e].title}, `}rank ${rank}`;
const selectedRank = () => stepOf(state.exhibit).ranks[state.rank];
const selectedBucket = () => selectedRank().buckets.find((bucket) => bucket.index === state.bucket);
const longest = () => Math.max(...exhibits.map((_, e) => stepOf(e).end));
const view = () => state.view ?? [0, longest()];

/** The rank that stands still longest, and for how long it does. */
const stillest = (step) => step.ranks.reduce((a, b) => (b.parts[STILL] > a.parts[STILL] ? b : a));
const exposedIn = (step) => stillest(step).parts[STILL];

/** Select the bucket that costs most. */
function selectWorst() {
  const step = stepOf(0);
  const [number, bucket] = step.worst ?? [step.ranks[0].rank, step.ranks[0].buckets.at(-1)?.index ?? null];
  const rank = step.ranks.findIndex((candidate) => candidate.rank === number);
  Object.assign(state, { exhibit: 0, rank, bucket, view: null });
}
