// The whole page: drawn once, and again after each choice.

function render() {
  renderSummary();
  renderSteps();
  renderTimeline();
  renderBucket();
  renderParts();
  renderPlans();
}

/** A button with a `data-key` does what that key does. */
function listenToButtons() {
  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => KEYS[button.dataset.key]());
  }
  byId("all-ranks").addEventListener("click", () => {
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
