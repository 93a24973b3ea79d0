// The whole page: drawn once, and again after each choice.

function render() {
  renderSummary();
  renderSteps();
  renderTimeline();
  renderBucket();
  renderParts();
  renderWhatIfs();
}

selectWorst();
render();
listenToTimeline(byId("timeline"));
for (const button of document.querySelectorAll("[data-key]")) {
  button.addEventListener("click", () => KEYS[button.dataset.key]());
}
addEventListener("resize", renderTimeline); // the axis has room for more marks, or less
