"use strict";
const data = JSON.parse(document.getElementById("data").textContent), K = data.constants;
const at = id => document.getElementById(id), part = (id, query) => at(id).querySelector(query);
const esc = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const ms = s => s < 1e-9 ? "0 ms" : s < 1e-3 ? `${(1e6 * s).toFixed(0)} µs` : s < 1 ? `${(1e3 * s).toFixed(s < 0.1 ? 1 : 0)} ms` : `${s.toFixed(2)} s`;
const size = n => n < 1024 ? `${n} B` : n < MIB ? `${+(n / 1024).toPrecision(3)} KiB` : n < 1024 * MIB ? `${+(n / MIB).toPrecision(3)} MiB` : `${(n / 1024 / MIB).toFixed(2)} GiB`;
const hue = (k, n) => `hsl(${Math.round(360 * k / n + 15)} 62% 62%)`;
const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const el = (name, attributes, inner = "") =>
  `<${name} ${Object.entries(attributes).map(([key, value]) => `${key}="${value}"`).join(" ")}>${inner}</${name}>`;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// ------------------------------------------------------------------ lanes: bars over time, in any picture

const LEFT = 62, RIGHT = 8;
const HATCHES = `<defs>${["late", "exposed", "waits", "wire"].map((id, i, all) => i % 2 ? "" :
  `<pattern id="${id}" width="6" height="6" patternTransform="rotate(45)" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="var(--card)"/>
   <rect width="1.5" height="6" fill="var(--${all[i + 1]})"/></pattern>`).join("")}</defs>`;

/** Lanes are {label, height, bars: [{begin, end, kind, text}], ticks: [seconds]}; `until` is the right edge. */
function drawLanes(svg, lanes, until, cursor = null, axis = true) {
  const width = Math.max(240, svg.clientWidth || svg.parentNode.clientWidth - 20), x = t => LEFT + t / until * (width - LEFT - RIGHT);
  let y = 2, out = HATCHES;
  const height = sum(lanes.map(l => l.height + 4)) + (axis ? 20 : 2);
  const unit = 10 ** Math.floor(Math.log10(until)), every = [0.2, 0.5, 1, 2, 5].map(k => k * unit).find(k => (x(k) - LEFT) >= 70) || until;
  if (axis) for (let t = 0; t < until; t += every) {
    out += el("line", { class: "grid", x1: x(t), x2: x(t), y1: 0, y2: height - 16 });
    if (x(t) < width - 48) out += el("text", { x: x(t) + 2, y: height - 4 }, t ? ms(t).replace(".0 ", " ") : "0");
  }
  for (const { label, height: h, bars, ticks = [] } of lanes) {
    out += `<text x="0" y="${y + h / 2 + 4}">${esc(label)}</text><rect class="ground" x="${LEFT}" y="${y}" width="${width - LEFT - RIGHT}" height="${h}"/>`;
    for (const { begin, end, kind, text = "", fill } of bars) {
      const w = Math.max(0.8, x(end) - x(begin) - (x(end) - x(begin) > 3 ? 0.7 : 0));
      out += `<rect class="${kind}" x="${x(begin)}" y="${y}" width="${w}" height="${h}"${fill ? ` style="fill:${fill}"` : ""}/>`;
      if (w > 7 * String(text).length + 4 && text !== "") out += `<text class="${kind.startsWith("moves") ? "on" : "on-bar"}" x="${x(begin) + w / 2}" y="${y + h / 2 + 4}">${esc(text)}</text>`;
    }
    if (ticks.length < 600) for (const t of ticks) out += `<line class="tick" x1="${x(t)}" x2="${x(t)}" y1="${y + 0.6 * h}" y2="${y + h}"/>`;
    y += h + 4;
  }
  if (cursor !== null) out += `<line class="cursor" x1="${x(cursor)}" x2="${x(cursor)}" y1="0" y2="${height - 16}"/>`;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  svg.innerHTML = out;
  svg.timeAt = px => (px - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT) * until;
}

/** Drag or arrow keys: `place(px)` for a pointer, `step(by)` for a key. */
function draggable(node, place, step) {
  const move = event => { if (event.buttons || event.pointerType === "mouse") place(event.clientX); };
  node.onpointerdown = event => { node.setPointerCapture(event.pointerId); place(event.clientX); };
  node.onpointermove = move;
  node.onkeydown = event => {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9 }[event.key];
    if (by) { step(by); event.preventDefault(); }
  };
}

/** What happens at a moment, modelled or recorded; `data.code` has its line. */
const SAYS = {
  FORWARD_BEGIN: "Forward computes. Nothing travels.",
  BACKWARD_BEGIN: "Backward begins, from the last layer.",
  GRADIENT_KEPT: "Under no_sync gradients are added up locally, and nothing is sent.",
  PARAM_READY: "The gradient of {} is ready. Its hook only counts.",
  BUCKET_READY: "Bucket {} is full: all of its gradients are packed into it.",
  BUCKET_LAUNCHED: "The all-reduce of bucket {} is launched, and backward goes on.",
  BUCKET_COMPLETED: "Bucket {} holds the averages. Nothing has waited for that yet.",
  BUCKET_WAITED: "Backward is over, and so is the wait for bucket {}.",
  BUCKET_UNPACKED: "The averages of bucket {} go into .grad, for the optimizer.",
};
const momentOf = (t, code, subject) => ({ t, code, subject, says: SAYS[code].replace("{}", () => subject) });

function showCode(box, key) {
  const code = data.code[key];
  if (!code || box.dataset.key === key) return;
  box.dataset.key = key;
  box.innerHTML = `<b>${esc(code.where)}</b><pre>${code.lines.map((line, n) => `<span${n === code.acts ? ' class="acts"' : ""}>${esc(line)}</span>`).join("")}</pre>`;
  const pre = box.querySelector("pre"), acts = box.querySelector(".acts");
  if (acts) pre.scrollTop = acts.offsetTop - pre.offsetTop - pre.clientHeight / 2 + acts.offsetHeight;
}

// ------------------------------------------------------------------ settings and their controls

const power = (low, high, step, text) => ({ min: Math.log2(low), max: Math.log2(high), step, to: x => 2 ** x, from: v => Math.log2(Math.max(v, low)), text });
const plain = (min, max, step, text) => ({ min, max, step, to: x => x, from: x => x, text });
const CONTROLS = {
  buckets: { capMib: ["bucket size", { ...power(1 / 16, 1024, 0.25, v => size(v * MIB)), from: v => Math.log2(v ?? K.cap / MIB) }] },
  cluster: {
    ranks: ["ranks", plain(1, 8, 1, String)],
    rate: ["link, bytes per second", power(1 / 16, 256, 0.25, v => `${+v.toPrecision(2)} GB/s`)],
    latencyUs: ["latency of a hop", power(1, 4096, 0.5, v => ms(v / 1e6))],
    slow: ["the last rank is slower", plain(1, 3, 0.05, v => v === 1 ? "no" : `× ${v.toFixed(2)}`)],
    taken: ["taken from backward", plain(0, 1, 0.05, v => v ? `${Math.round(100 * v)}% of a message` : "nothing: a GPU")],
  },
  model: {
    layers: ["layers", plain(2, 96, 1, String)],
    width: ["width of a layer", { ...power(64, 8192, 0.5, v => `${v}: ${size(4 * v * v)}`), to: x => Math.round(2 ** x) }],
    embeddingMib: ["embedding, ready last", { ...power(1, 2048, 0.5, v => v ? size(v * MIB) : "none"), to: x => x ? 2 ** x : 0, from: v => v && Math.log2(v) }],
    layerMs: ["backward of a layer", power(1 / 32, 64, 0.25, v => ms(v / 1e3))],
  },
  step: {
    accumulate: ["micro-batches (no_sync)", plain(1, 8, 1, String)],
    wireBytes: ["on the wire", { min: 0, max: 1, step: 1, to: x => x ? 2 : 4, from: v => v === 2 ? 1 : 0, text: v => v === 2 ? "float16" : "float32" }],
  },
};
const s = { ...data.start, job: null, plan: null };
const ofModel = Object.keys(CONTROLS.model), inputs = {};
let moment = null, until = 0, tried = new Map(), shown = false;

function slider(name, [label, { min, max, step, to, from, text }], target, changed) {
  const node = document.createElement("label"), input = document.createElement("input"), output = document.createElement("output");
  Object.assign(input, { type: "range", min, max, step, name });
  const sync = () => { input.value = from(target[name]); output.textContent = text(target[name]); input.setAttribute("aria-valuetext", output.textContent); };
  input.oninput = () => { target[name] = to(Number(input.value)); sync(); changed(name); };
  node.append(label, output, input);
  inputs[name] = { input, sync };
  sync();
  return node;
}

function changed(name) {
  moment = null;
  if (name !== "capMib") [tried, shown] = [new Map(), false];
  else s.plan = null;
  draw();
}

function makeControls() {
  const form = part("step", ".controls");
  form.innerHTML = `<select name="preset" aria-label="settings"><option value="" hidden>a recording</option>
    ${Object.keys(data.presets).map(name => `<option>${esc(name)}</option>`).join("")}</select>`;
  for (const [group, controls] of Object.entries(CONTROLS)) {
    const set = document.createElement("fieldset");
    set.innerHTML = group === "buckets" ? "" : `<legend>${group}</legend>`;
    set.append(...Object.entries(controls).map(([name, control]) => slider(name, control, s, changed)));
    if (group === "buckets") set.insertAdjacentHTML("beforeend", `<div class="row"><button type="button" id="torch">DDP's default: 1, then 25 MiB</button></div>`);
    form.append(set);
  }
  part("step", "select").selectedIndex = 1;
  part("step", "select").onchange = ({ target }) => { Object.assign(s, data.presets[target.value], { job: null, plan: null }); sync("ranks"); };
  at("torch").onclick = () => { [s.capMib, s.plan] = [null, null]; sync("capMib"); };
}

function sync(name) {
  if (s.job) part("step", "select").value = "";
  for (const [key, { sync, input }] of Object.entries(inputs)) { if (key in s) sync(); if (ofModel.includes(key)) input.disabled = !!s.job; }
  if (s.capMib === null) part("step", "output").textContent = s.plan ? "as recorded" : "1, then 25 MiB";
  changed(name);
}

// ------------------------------------------------------------------ part 1

/** A message: hidden until backward is `over`, then exposed. The longer half has the number. */
function halves(begin, end, over, number) {
  const edge = clamp(over, begin, end), text = kind => (kind === "moves") === (edge - begin >= end - edge) ? number : "";
  return [[begin, edge, "moves"], [edge, end, "moves-exposed"]].filter(([from, to]) => to > from).map(([from, to, kind]) => ({ begin: from, end: to, kind, text: text(kind) }));
}

const now = (changes = {}) => { const t = { ...s, ...changes }; return stepOf(t, K, "bucketed", t.plan); };

/** The lanes of a step, and the moments of rank 0 with their code. */
function lanesOf(step) {
  const slowest = s.ranks - 1, { job } = step, lanes = [], moments = [], end = step.begin + step.end;
  const slowDone = step.begin + wallOf(step, step.backward), height = s.ranks > 4 ? 15 : 22, say = (...of) => moments.push(momentOf(...of));
  for (const rank of range(s.ranks)) {
    const f = rank === slowest ? s.slow : 1, bars = [], first = rank === 0;
    let t = 0;
    const bar = (takes, kind, text) => { bars.push({ begin: t, end: t += takes, kind, text }); };
    for (const micro of range(s.accumulate)) {
      if (first) say(t, "FORWARD_BEGIN");
      bar(f * job.forward, "forward", "forward");
      if (micro === s.accumulate - 1) break;
      if (first) say(t, "GRADIENT_KEPT");
      bar(f * job.backward, "local", "no_sync");
    }
    const clock = t - step.begin, wall = at => step.begin + wallOf(step, clock + f * at), done = wall(job.backward);
    const ready = job.ready.map(wall);
    bars.push({ begin: t, end: done, kind: "backward", text: "backward" });
    if (done < slowDone) bars.push({ begin: done, end: slowDone, kind: "late" });
    if (slowDone < end) bars.push({ begin: slowDone, end, kind: "blocked" });
    t = end;
    bar(job.copy, "copy");
    bar(f * job.rest, "rest", "rest");
    lanes.push({ label: `rank ${rank}`, height, bars, ticks: [...new Set(ready)] });
    if (!first) continue;
    byReadiness(ready).forEach(p => say(ready[p], "PARAM_READY", job.names[p]));
    if (s.ranks > 1) step.plan.forEach((bucket, b) => {
      const full = Math.max(...bucket.map(p => ready[p])), arrives = step.begin + step.transfers[b].end;
      say(full, "BUCKET_READY", b);
      say(full, "BUCKET_LAUNCHED", b);
      say(arrives, "BUCKET_COMPLETED", b);
      say(Math.max(done, arrives), "BUCKET_WAITED", b);
      say(Math.max(done, arrives), "BUCKET_UNPACKED", b);
    });
  }
  const messages = step.transfers.flatMap(({ begin, end }, b) => halves(step.begin + begin, step.begin + end, slowDone, b));
  if (s.ranks > 1) lanes.push({ label: "link", height: 26, bars: messages });
  return { lanes, moments: moments.sort((a, b) => a.t - b.t) };
}

function drawStep() {
  const step = now(), { lanes, moments } = lanesOf(step), svg = part("step", ".lanes");
  if (step.length > until || step.length < 0.45 * until) until = 1.3 * step.length;
  moment = clamp(moment ?? moments.findIndex(m => m.code === "BUCKET_LAUNCHED"), 0, moments.length - 1);
  const { t, code, says } = moments[moment], ideal = step.computed + step.job.copy, taken = wallOf(step, step.backward) - step.backward;
  const slowed = taken > 1e-9 ? `, ${ms(taken)} of it by a slower backward` : "";
  part("step", ".figures").innerHTML = `<span>step <b>${ms(step.length)}</b></span>
    <span class="red">exposed <b>${ms(step.exposed)}</b>${slowed}</span><span>efficiency <b>${Math.round(100 * ideal / step.length)}%</b></span>
    <span>${many(step.plan.length, "bucket")} of ${size(sum(step.job.sizes))}</span>`;
  drawLanes(svg, lanes, until, t);
  svg.setAttribute("aria-valuetext", `${ms(t)}: ${says}`);
  part("step", ".says").innerHTML = `<b>${ms(t)}</b> ${esc(says)}`;
  showCode(part("step", ".code"), code);
  draggable(svg, px => { const time = svg.timeAt(px); moment = Math.max(0, moments.findLastIndex(m => m.t <= time)); drawStep(); }, by => { moment += by; drawStep(); });
}

// ------------------------------------------------------------------ part 2

function drawBest() {
  const svg = at("chart"), width = Math.max(240, svg.clientWidth), height = 230, [low, high] = [-4, 10];
  const exposed = capMib => now({ capMib, plan: null }).exposed, x = cap => 46 + (Math.log2(cap) - low) / (high - low) * (width - 60);
  const caps = range((high - low) * 4 + 1).map(k => 2 ** (low + k / 4)), all = caps.map(exposed), top = 1.05 * Math.max(...all, 1e-9);
  const y = value => 8 + (1 - value / top) * (height - 36), step = now();
  if (s.capMib !== null) tried.set(s.capMib, step.exposed);
  let out = "";
  for (const value of [0, top / 2.1, top / 1.05])
    out += el("line", { class: "grid", x1: 46, x2: width, y1: y(value), y2: y(value) }) + el("text", { x: 0, y: y(value) + 4 }, value ? ms(value) : "0");
  for (const cap of [1 / 16, ...(width < 500 ? [] : [1 / 4]), 1, 5, 25, 128, 1024]) {
    const anchor = cap < 0.1 ? "start" : cap > 999 ? "end" : "middle";
    out += el("text", { x: x(cap), y: height - 6, "text-anchor": anchor }, size(cap * MIB).replace(".00 ", " "));
  }
  const least = all.findLastIndex(value => value < Math.min(...all) + 1e-9);
  if (shown) out += `<polyline class="curve" points="${caps.map((cap, i) => `${x(cap)},${y(all[i])}`).join(" ")}"/><circle class="least" cx="${x(caps[least])}" cy="${y(all[least])}" r="8"/>`;
  for (const [cap, value] of tried) out += `<circle class="dot" cx="${x(cap)}" cy="${y(value)}" r="4.5"/>`;
  if (s.capMib !== null) out += `<circle class="now" cx="${x(s.capMib)}" cy="${y(step.exposed)}" r="7"/>`;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  svg.innerHTML = out;
  const here = s.capMib === null ? "" : `You are at ${size(s.capMib * MIB)}: ${ms(step.exposed)} exposed. `;
  let best = "";
  if (shown) {
    const plan = planBuckets(step.sizes, step.ready, step.link, step.backward, K.halvings), found = now({ plan }), last = found.messages.at(-1);
    best = `The best of equal sizes is ${size(caps[least] * MIB)}: ${ms(all[least])}. bucket_cap_mb="auto" sizes the last bucket by itself, since nothing hides it: ` +
      `${many(plan.length, "bucket")}, the last of ${size(last.nbytes)}: ${ms(found.exposed)}.`;
  }
  at("found").textContent = here + best;
  svg.setAttribute("aria-valuetext", here);
  const set = place => { s.capMib = 2 ** (low + clamp(place, 0, caps.length - 1) / 4); s.plan = null; sync("capMib"); };
  draggable(svg, px => set(Math.round(((px - svg.getBoundingClientRect().left - 46) / (width - 60)) * (caps.length - 1))),
    by => set(Math.round((Math.log2(s.capMib ?? 25) - low) * 4) + by));
  svg.onpointermove = event => { if (event.buttons) svg.onpointerdown(event); };
}

// ------------------------------------------------------------------ part 3

let rung = "bucketed";
function drawRungs() {
  const steps = Object.keys(RUNGS).map(name => [name, stepOf(s, K, name)]), longest = Math.max(...steps.map(([, step]) => step.length));
  at("ladder").innerHTML = steps.map(([name, step]) => `<button class="rung" data-rung="${name}" aria-pressed="${name === rung}"><span class="figures"><b>${name}</b>
    <span>step ${ms(step.length)}</span><span class="red">exposed ${ms(step.exposed)}</span><span>${step.plan.length ? many(step.plan.length, "message") : "no messages: each rank trains a model of its own"}</span></span><svg></svg></button>`).join("");
  steps.forEach(([name, step], i) => {
    const kept = s.ranks, lanes = lanesOf(step).lanes, svg = at("ladder").querySelectorAll("svg")[i];
    drawLanes(svg, [{ ...lanes[kept - 1], label: "rank", height: 16 }, { ...(lanes[kept] || { bars: [] }), label: "link", height: 16, ticks: [] }], longest, null, false);
  });
  showCode(part("rungs", ".code"), rung);
  at("ladder").onclick = ({ target }) => { rung = target.closest("[data-rung]")?.dataset.rung || rung; drawRungs(); part("ladder", "[aria-pressed=true]").focus(); };
}

// ------------------------------------------------------------------ part 4

const LAYERS = [..."ABCDEFG", "embed"], MIBS = [2, 2, 4, 2, 1, 2, 6, 6], p4 = { cap: 4 };
let uses = [7, ...range(7)];
function drawPlans() {
  const sizes = MIBS.map(mib => mib * MIB), each = 2e-3, link = { latency: 3e-4, rate: 2e9, taken: 0 }, colour = p => hue(p, 8);
  const chip = (p, tag = "span", label = {}) => el(tag, { class: "chip", "data-layer": p, style: `background:${colour(p)}`, ...label }, `${LAYERS[p]} ${MIBS[p]}`);
  const order = [...uses].reverse(), ready = range(8).map(p => each * (order.indexOf(p) + 1)), caps = [Math.floor(p4.cap * MIB)], end = each * 8;
  const guess = fill(sizes, range(8), caps).map(bucket => [...bucket]).reverse();
  const plans = { "First step: one bucket for all, since the order is only a guess": [[range(8)], "plan_from_registration"],
    "With find_unused_parameters, in every step: registration order, reversed": [guess, "plan_from_registration"],
    "From the second step: rebuilt in the order of readiness": [fill(sizes, order, caps), "plan_from_readiness"] };
  const runs = Object.entries(plans).map(([title, [plan]]) => {
    const messages = messagesOf(plan, sizes, ready);
    return { title, plan, transfers: simulate(messages, link), end: predicted(messages, link, end) };
  });
  at("uses").innerHTML = uses.map(p => chip(p, "button", { "aria-label": `${LAYERS[p]}: use it one place earlier` })).join("");
  at("plans").innerHTML = runs.map(({ title, plan, end: over }) => `<div class="one-plan"><p class="figures"><span>${title}</span><span class="red">exposed <b>${ms(over - end)}</b></span></p>
    <div>${plan.map((bucket, b) => `<span class="box">${b} ${bucket.map(p => chip(p)).join("")}</span>`).join("")}</div><svg></svg></div>`).join("");
  runs.forEach(({ transfers, plan, end: over }, i) => drawLanes(at("plans").querySelectorAll("svg")[i], [
    { label: "backward", height: 18, bars: [...order.map((p, k) => ({ begin: k * each, end: (k + 1) * each, kind: "on-layer", fill: colour(p) })), ...(over > end ? [{ begin: end, end: over, kind: "blocked" }] : [])] },
    { label: "link", height: 18, bars: transfers.flatMap(({ begin, end: to }, b) => halves(begin, to, end, b)) },
  ], 32e-3, null, i === 2));
  showCode(part("plan", ".code"), "rebuild");
}
function setUses(order) { uses = order; drawPlans(); }
at("uses").onclick = ({ target }) => {
  const place = uses.indexOf(Number(target.dataset.layer)), order = [...uses];
  if (place < 1) return;
  [order[place - 1], order[place]] = [order[place], order[place - 1]];
  setUses(order);
  part("uses", `[data-layer="${order[place - 1]}"]`).focus();
};
at("shuffle").onclick = () => setUses([...uses].sort(() => Math.random() - 0.5));
at("restore").onclick = () => setUses(range(8));

// ------------------------------------------------------------------ part 5

const p5 = { algorithm: "ring", n: 4, mib: 25 };
const RECEIVES = { reduce: "adds what arrives", "reduce-scatter": "adds what arrives", "all-gather": "overwrites its chunk with the complete sum", broadcast: "overwrites its buffer with the complete sum" };
function drawReduce() {
  const run = data.collectives[p5.algorithm][p5.n - 2], bar = part("reduce", ".place"), last = run.steps.length - 1;
  bar.max = last;
  const k = clamp(Number(bar.value), 0, last), step = run.steps[k], arrived = new Set(step.transfers.map(([, to, chunk]) => `${to} ${chunk}`));
  const senders = new Set(step.transfers.map(t => t[0])).size;
  at("algorithms").innerHTML = Object.keys(data.collectives).map(name => `<button data-algorithm="${name}" aria-pressed="${name === p5.algorithm}">${name}</button>`).join("");
  part("reduce", ".says").textContent = k === 0 ? `Before: every rank has only its own gradient, in ${many(run.chunks, "chunk")}.`
    : p5.algorithm === "shared memory" ? `Step ${k} of ${last}: ${step.phase}.`
    : `Step ${k} of ${last}, ${step.phase}: ${many(senders, "rank")} ${senders > 1 ? "send" : "sends"}, and the receiver ${RECEIVES[step.phase]} (framed).`;
  const chunkOf = (mask, rank, chunk) => {
    const within = range(p5.n).map(r => mask >> r & 1), stripes = within.map((has, r) => el("i", has ? { style: `background:${hue(r, p5.n)}` } : {}));
    const title = `rank ${rank}, chunk ${chunk}: the gradients of ranks ${range(p5.n).filter(r => within[r]).join(", ")}`;
    return el("div", { class: arrived.has(`${rank} ${chunk}`) ? "chunk to" : "chunk", title }, stripes.join(""));
  };
  at("ranks").innerHTML = step.masks.map((chunks, rank) =>
    el("div", { class: "buffer" }, `<span>rank ${rank}</span>${chunks.map((mask, c) => chunkOf(mask, rank, c)).join("")}`)).join("");
  const hop = { latency: s.latencyUs / 1e6, rate: s.rate * 1e9 }, takes = one => sum(one.steps.slice(1).map(st => seconds(hop, st.most * p5.mib * MIB / one.chunks)));
  at("costs").textContent = p5.algorithm === "shared memory" ? "No byte is sent: the buffers lie in memory that all ranks of a host can reach, and the ranks synchronise twice, before and after."
    : `${last} latencies, and the busiest rank sends ${run.sent.toFixed(2)} times its buffer. With ${size(p5.mib * MIB)} and the link of part 1: ` +
      ["ring", "tree"].map(name => `${name} ${ms(takes(data.collectives[name][p5.n - 2]))}`).join(", ") + ".";
  showCode(part("reduce", ".code"), p5.algorithm);
  stepper("reduce", k, last, drawReduce);
}
at("algorithms").onclick = ({ target }) => { if (target.dataset.algorithm) { p5.algorithm = target.dataset.algorithm; drawReduce(); } };

/** The buttons and the slider of a part; `show` reads the slider. */
function stepper(id, k, last, show) {
  const bar = part(id, ".place"), go = to => { bar.value = clamp(to, 0, last); show(); };
  bar.oninput = show;
  part(id, ".back").onclick = () => go(k - 1);
  part(id, ".next").onclick = () => go(k + 1);
  return go;
}

// ------------------------------------------------------------------ part 6

let own = null;
function load(recording, rings = []) {
  const read = readRecording(recording, K), zero = Math.min(...read.typical.map(r => r.begin)), names = read.job.names;
  const moments = read.typical[0].events.filter(e => SAYS[e[1]]).map(([t, kind, subject]) =>
    ({ ...momentOf((t - zero) / 1e9, kind, kind === "PARAM_READY" ? names[subject] : subject), param: subject }));
  own = { ...read, zero, moments, rings };
  part("own", ".place").max = moments.length - 1;
  part("own", ".place").value = 0;
  const link = read.hop && allReduce(read.world, read.hop);
  at("use").disabled = !link;
  at("recorded").innerHTML = `<span>${esc(read.title || "a recorded step")}, ${many(read.world, "rank")}</span><span>recorded <b>${ms(read.measured)}</b></span>` + (link
    ? `<span>by the model <b>${ms(stepOf({ ...s, ...settingsOf(read) }, K, "bucketed", read.plan).length)}</b></span><span>link: ${ms(link.latency)} + ${+(link.rate / 1e9).toPrecision(2)} GB/s</span>`
    : "<span>no message between two ranks was seen to arrive, so there is no model of the link</span>");
  drawOwn();
}

const settingsOf = ({ job, plan, world, hop }) =>
  ({ job, plan, capMib: null, ranks: world, rate: hop.rate / 1e9, latencyUs: 1e6 * hop.latency, slow: 1, accumulate: 1, taken: 0, wireBytes: 4 });

function drawOwn() {
  const k = Number(part("own", ".place").value), { t, code: kind, subject, param, says } = own.moments[k], svg = part("own", ".lanes"), T = ns => (ns - own.zero) / 1e9;
  const lanes = own.typical.flatMap(rank => [
    { label: `rank ${rank.rank}`, height: 20, bars: rank.spans.map(x => ({ begin: T(x.begin), end: T(x.end), kind: x.activity, text: ["forward", "backward"].includes(x.activity) ? x.activity : "" })), ticks: Object.values(rank.at.PARAM_READY || {}).map(T) },
    { label: "sends", height: 18, bars: rank.wires.flatMap((w, b) => !w ? [] : [{ begin: T(w.free), end: T(w.begin), kind: "waits" }, ...halves(T(w.begin), T(w.end), T(rank.complete), b)].filter(x => x.end > x.begin)) }]);
  drawLanes(svg, lanes, Math.max(...own.typical.map(r => T(r.end))), t);
  at("says").innerHTML = `<b>${(1e3 * t).toFixed(2)} ms</b> ${esc(says)}`;
  const past = own.moments.slice(0, k + 1), ready = new Set(past.filter(m => m.code === "PARAM_READY").map(m => m.param));
  const had = (code, subject) => past.some(m => m.code === code && m.subject === subject);
  at("buckets").innerHTML = own.plan.map((bucket, b) => `<div class="bucket${had("BUCKET_LAUNCHED", b) ? " launched" : ""}${had("BUCKET_UNPACKED", b) ? " unpacked" : ""}${kind !== "PARAM_READY" && kind.startsWith("B") && subject === b ? " acts" : ""}">
    <b>bucket ${b}, ${size(sum(bucket.map(p => own.job.sizes[p])))}: ${bucket.filter(p => ready.has(p)).length} of ${bucket.length}</b>
    ${bucket.map(p => `<div class="gradient${ready.has(p) ? " ready" : ""}${kind === "PARAM_READY" && param === p ? " acts" : ""}">${esc(own.job.names[p])}</div>`).join("")}</div>`).join("");
  showCode(part("own", ".code"), kind);
  showRing(["BUCKET_LAUNCHED", "BUCKET_COMPLETED", "BUCKET_WAITED", "BUCKET_UNPACKED"].includes(kind) ? own.rings[subject] : null);
  const last = own.moments.length - 1, go = stepper("own", k, last, drawOwn);
  draggable(svg, px => { const time = svg.timeAt(px); go(own.moments.findLastIndex(m => m.t <= time)); }, by => go(k + by));
}

function showRing(ring) {
  at("ring").hidden = !ring;
  if (!ring) return;
  at("element").textContent = ring.element;
  at("about").textContent = `The first and the last row were recorded. Those between are computed from the first, as a ring of ` +
    `${ring.rows[0].values.length} adds it; the element is in chunk ${ring.chunk}. What has just arrived is marked. ` +
    `Another algorithm may add in another order, which can change the last digit.`;
  part("ring", "table").innerHTML = `<tr><th>step</th>${ring.rows[0].values.map((_, rank) => `<th>rank ${rank}</th>`).join("")}</tr>` +
    ring.rows.map(({ step, values, to }) => `<tr><th>${esc(step)}</th>${values.map((v, rank) => `<td${rank === to ? ' class="to"' : ""}>${v.toPrecision(7)}</td>`).join("")}</tr>`).join("");
}

at("file").onchange = async ({ target }) => {
  try { load(JSON.parse(await target.files[0].text())[K.key] ?? {}); } catch (error) { at("recorded").textContent = `${target.files[0].name} cannot be read. ${error.message}`; }
};
at("use").onclick = () => { Object.assign(s, settingsOf(own)); sync("ranks"); at("step").scrollIntoView(); };

// ------------------------------------------------------------------ all parts

function draw() { drawStep(); drawBest(); drawRungs(); drawReduce(); }
makeControls();
at("reveal").onclick = () => { shown = true; drawBest(); };
at("plan-controls").append(slider("cap", ["bucket size", plain(1, 24, 1, v => `${v} MiB`)], p4, drawPlans));
at("reduce-controls").append(slider("n", ["ranks", plain(2, 8, 1, String)], p5, drawReduce), slider("mib", ["message", power(1 / 4096, 1024, 1, v => size(v * MIB))], p5, drawReduce));
for (const form of document.forms) form.onsubmit = event => event.preventDefault();
if (data.own) document.querySelector("main").prepend(at("own"));
load(data.recording, data.rings);
draw();
drawPlans();
new ResizeObserver(() => { draw(); drawPlans(); drawOwn(); }).observe(document.body);
