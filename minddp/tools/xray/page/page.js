"use strict";

document.getElementById("timeline").addEventListener("click", (event) => {
  const bucket = event.target.closest(".bucket");
  if (!bucket) return;
  for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.id !== bucket.dataset.panel;
});
