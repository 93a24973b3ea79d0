// The step with one thing changed, as `what_if.py` has played it again; the reader chooses which.

function renderWhatIfs() {
  const [{ typical, whatIfs, model, warning }] = exhibits;
  byId("what-ifs").hidden = !alone || state.steps[0] !== typical || whatIfs.length === 0;
  if (byId("what-ifs").hidden) return;
  const chosen = whatIfs[state.whatIf], most = Math.max(...whatIfs.map(({ length }) => length));
  const rows = chosen.ranks.map((rank, k) => ({
    ...rank, layout: chosen.layout, label: `rank ${rank.rank}`,
    heading: k === 0 && `Step ${chosen.number} as it would be`,
  }));
  const end = Math.max(longest(), ...rows.map(({ spans }) => spans.at(-1)[2]));
  fill("what-ifs",
    html("h2", { id: "what-ifs-title" }, "If one thing were different"),
    html("p.soft", "The recorded steps, played again by a model: the length of a step on average, of which red is what " +
      "communication costs. Choose one to see the step that it would give."),
    html("div", { role: "radiogroup", "aria-labelledby": "what-ifs-title" },
      whatIfs.map((change, k) => whatIfRow(change, k, most))),
    warning !== "" && html("p.warning", warning),
    chosen.code !== "" && html("p", html("code", chosen.code)),
    html("div", { id: "what-if-chart" }, chart(rows, end)),
    html("p.soft", model));
}

/** The step's length is a bar, of which the exposed part is red; `most` is the longest on the same scale. */
function whatIfRow({ title, gain, layout, length, exposed }, k, most) {
  const choose = () => {
    state.whatIf = k;
    renderWhatIfs();
    document.querySelector(`input[name=what-if][value="${k}"]`).focus();
  };
  const radio = { type: "radio", name: "what-if", value: k, checked: k === state.whatIf, onchange: choose };
  const part = (value, color) =>
    html("i", { style: `width:${((100 * value) / most).toFixed(2)}%;background:var(--${color})` });
  return html("label.plan",
    html("input", radio),
    html("span", title),
    html("span.buckets.soft", plural(layout.length, "bucket")),
    html("span.track", { "aria-hidden": "true" }, part(length - exposed, "quiet"), part(exposed, "exposed")),
    html("b.time", ms(length)),
    html("span.change.soft", k === 0 ? "" : gain));
}
