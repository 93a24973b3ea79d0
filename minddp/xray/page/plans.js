// The step under other plans, as `what_if.py` predicts it, beside the measured one.

const NOTABLE_MISS = 0.1; // of the step: a model that is further off is no basis for a decision

function renderPlans() {
  const [{ typical, plans, model }] = exhibits;
  byId("plans").hidden = !alone || state.steps[0] !== typical || plans.length < 2;
  if (byId("plans").hidden) return;
  const step = stepOf(0), chosen = plans[state.plan];
  const most = Math.max(step.length, ...plans.map((plan) => plan.length));
  const host = html("div.plan-chart", { id: "plan-chart" });
  fill("plans",
    html("h2", { id: "plans-title" }, "The same step under another plan, predicted"),
    html("p.soft", "Red: for how long the rank that stands still longest does so. Percentages are of the " +
      "recorded plan, predicted as well."),
    html("div", { role: "radiogroup", "aria-labelledby": "plans-title" },
      html("div.plan", html("span"),
        lengthCells("measured", layoutOf(0).buckets.length, step.length, exposedIn(step), most)),
      plans.map((plan, k) => planRow(plan, k, most))),
    modelWarning(plans[0]),
    chosen.code !== "" && html("p", html("code", `DistributedDataParallel(model, ${chosen.code})`)),
    host,
    html("p.soft", model));
  const ends = chosen.ranks.map(({ spans }) => spans.at(-1)[2]);
  chart(host, planChartRows(chosen), [0, Math.max(longest(), ...ends)]);
}

function planRow(plan, k, most) {
  const radio = { type: "radio", name: "plan", value: k, checked: k === state.plan, onchange: () => choosePlan(k) };
  return html("label.plan", html("input", radio),
    lengthCells(plan.title, plan.sizes.length, plan.length, plan.exposed, most),
    html("span.change.soft", k === 0 ? "" : changeFrom(exhibits[0].plans[0], plan)));
}

/** In percent of the recorded plan as predicted, so that the model's error does not count as a gain. */
function changeFrom(recorded, plan) {
  const more = 100 * (plan.length / recorded.length - 1);
  return Math.abs(more) < 0.5 ? "same" : `${more > 0 ? "+" : "−"}${Math.abs(more).toFixed(0)}%`;
}

function modelWarning(recorded) {
  const miss = recorded.length / stepOf(0).length - 1;
  if (Math.abs(miss) < NOTABLE_MISS) return null;
  const off = `${percent(Math.abs(miss))} ${miss > 0 ? "more" : "less"}`;
  return html("p.warning", html("b", "Do not rely on these times. "),
    `For the recorded plan the model says ${off} than was measured; it may be as wrong about the others.`);
}

function choosePlan(k) {
  state.plan = k;
  renderPlans();
  document.querySelector(`input[name=plan][value="${k}"]`).focus();
}

/** The measured step and the predicted one, on the rank that stands still longest. */
function planChartRows(chosen) {
  const { ranks } = stepOf(0), rank = stillest(stepOf(0));
  const layout = { params: [], buckets: chosen.sizes.map((nbytes) => ({ nbytes, params: [] })) };
  const measured = { ...rank, layout: layoutOf(0), label: "measured" };
  return [measured, { ...measured, ...chosen.ranks[ranks.indexOf(rank)], layout, label: "predicted" }];
}
