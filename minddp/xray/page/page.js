// The whole page: drawn once, and again after each choice.

function render() {
  renderSummary();
  renderSteps();
  renderTimeline();
  renderBucket();
  renderParts();
  renderPlans();
}

/** Light or dark as the system is, until the button says otherwise. */
function listenForTheme() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => (root.dataset.theme = system.matches ? "dark" : "light");
  system.addEventListener("change", follow);
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
  follow();
}

function listenToButtons() {
  const onClick = (id, action) => byId(id).addEventListener("click", action);
  onClick("zoom-in", () => zoom(0.6));
  onClick("zoom-out", () => zoom(1 / 0.6));
  onClick("zoom-fit", showAll);
  onClick("step-before", () => turnTo(state.steps[0] - 1));
  onClick("step-after", () => turnTo(state.steps[0] + 1));
  onClick("all-ranks", () => {
    state.allRanks = true;
    renderTimeline();
  });
}

/** Charts are as wide as the window. Its height does not matter; phones change it while scrolling. */
function listenToWidth() {
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) render();
    width = innerWidth;
  });
}

listenForTheme();
selectWorst();
renderKey();
render();
const timeline = byId("timeline");
for (const listen of [listenToKeys, listenToWheel, listenToPointers, listenForCursor]) listen(timeline);
listenToOverview(byId("overview"));
listenToButtons();
listenForTips();
listenToWidth();
