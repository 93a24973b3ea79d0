"use strict";
const ZOOMS = [1, 2, 5, 10, 20, 50]; // the last is CLOSEST in __init__.py
const timeline = document.getElementById("timeline"), slider = document.getElementById("zoom");
let zoom = 1;

timeline.addEventListener("click", (event) => {
  const bucket = event.target.closest(".bucket");
  if (!bucket) return;
  for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.id !== bucket.dataset.panel;
});

slider.addEventListener("input", () => {
  const before = zoom, middle = timeline.clientWidth / 2, left = timeline.scrollLeft;
  zoom = ZOOMS[slider.value];
  timeline.firstElementChild.style.width = `${100 * zoom}%`;
  document.querySelectorAll(".mark").forEach((mark, k) => { mark.hidden = k % (ZOOMS.at(-1) / zoom) > 0; });
  timeline.scrollLeft = ((left + middle) * zoom) / before - middle;
});
