// The whole page: drawn once, and again after each choice.

function render() {
  renderSummary();
  renderSteps();
  renderTimeline();
  renderBucket();
  renderParts();
  renderPlans();
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

selectWorst();
renderKey();
render();
listenToTimeline(byId("timeline"));
listenToButtons();
listenToWidth();
