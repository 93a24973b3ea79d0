// The model of a step: what minddp/tools/forecast computes in Python. A test drives both and compares.
// Seconds and bytes. A link is {latency, rate, taken}, a plan a list of buckets, a bucket a list of parameters.
"use strict";
const MIB = 2 ** 20;
const sum = values => values.reduce((a, b) => a + b, 0);
const range = n => [...Array(n).keys()];
const median = values => {
  const sorted = [...values].sort((a, b) => a - b), half = (sorted.length - 1) / 2;
  return (sorted[Math.floor(half)] + sorted[Math.ceil(half)]) / 2;
};
const seconds = (link, nbytes) => link.latency + nbytes / link.rate;

// -------------------------------------------------------------------------- link.py

function allReduce(ranks, hop) {
  const passed = 2 * (ranks - 1) / ranks;
  return { latency: passed * ranks * hop.latency, rate: passed ? hop.rate / passed : Infinity, taken: hop.taken || 0 };
}

const hopOf = (link, ranks) =>
  ({ latency: link.latency / (2 * (ranks - 1)), rate: link.rate * 2 * (ranks - 1) / ranks, taken: 0 });

/** The line through [bytes, seconds] with the least squares of relative errors. */
function fitLink(points, leastPerByte) {
  const w = points.map(([, s]) => 1 / s ** 2), x = points.map(([n]) => n), y = points.map(([, s]) => s);
  const mean = values => sum(values.map((v, i) => v * w[i])) / sum(w);
  const slope = (mean(x.map((v, i) => v * y[i])) - mean(x) * mean(y)) / (mean(x.map(v => v * v)) - mean(x) ** 2);
  return { latency: Math.max(0, mean(y) - slope * mean(x)), rate: 1 / Math.max(leastPerByte, slope), taken: 0 };
}

// ------------------------------------------------------------------ plan.py, planner.py

/** DDP's buckets: they are filled in `order`, and a bucket closes once it reaches its capacity. */
function fill(sizes, order, caps) {
  const closed = [];
  let open = [], nbytes = 0;
  for (const param of order) {
    open.push(param);
    nbytes += sizes[param];
    if (nbytes < caps[Math.min(closed.length, caps.length - 1)]) continue;
    closed.push(open);
    [open, nbytes] = [[], 0];
  }
  return open.length ? [...closed, open] : closed;
}

const byReadiness = ready => range(ready.length).sort((a, b) => ready[a] - ready[b]);

/** The plan that ends soonest, and of equally good ones the first, which has larger buckets. */
function planBuckets(sizes, ready, link, computed, halvings) {
  const order = byReadiness(ready), caps = range(halvings).map(k => Math.floor(sum(sizes) / 2 ** k));
  let best = null, least = Infinity;
  for (const first of caps) for (const rest of caps) {
    const plan = fill(sizes, [...order].reverse(), [first, rest]).reverse().map(bucket => bucket.reverse());
    const end = predicted(messagesOf(plan, sizes, ready), link, computed);
    if (end < least) [best, least] = [plan, end];
  }
  return best;
}

// ------------------------------------------------------------------ step_model.py

const messagesOf = (plan, sizes, ready) => plan.map(bucket =>
  ({ nbytes: sum(bucket.map(p => sizes[p])), ready: Math.max(...bucket.map(p => ready[p])) }));

/** When each message begins and ends, one at a time. [Note: messages take time from backward] */
function simulate(messages, link) {
  let free = 0, behind = 0;
  return messages.map(({ nbytes, ready }) => {
    const takes = seconds(link, nbytes), clock = Math.max(free, ready), begin = clock + behind;
    free = clock + (1 - link.taken) * takes;
    behind += link.taken * takes;
    return { begin, end: begin + takes, clock, takes };
  });
}

function predicted(messages, link, computed) {
  const behind = link.taken * sum(messages.map(m => seconds(link, m.nbytes)));
  return Math.max(computed + behind, ...simulate(messages, link).map(t => t.end));
}

// ------------------------------------------------------------------ a step by the settings of the page

/** An embedding whose gradient comes last, then equal layers of a weight and a bias. */
function jobOf(s, backwardShare) {
  const layers = range(s.layers).flatMap(layer => [["weight", s.width ** 2], ["bias", s.width]].map(([kind, numel]) =>
    ({ name: `layer${layer + 1}.${kind}`, nbytes: 4 * numel, ready: (s.layers - layer) * s.layerMs / 1e3 })));
  const backward = s.layers * s.layerMs / 1e3;
  const params = s.embeddingMib ? [{ name: "embedding", nbytes: s.embeddingMib * MIB, ready: backward }, ...layers] : layers;
  return {
    names: params.map(p => p.name), sizes: params.map(p => p.nbytes), ready: params.map(p => p.ready), layers: s.layers,
    backward, forward: backward * (1 / backwardShare - 1), rest: 0, copy: 0,
  };
}

/** How the rungs of the ladder send: the buckets, and whether they leave before backward is over. */
const RUNGS = {
  "no wrapper": () => ({ plan: [], overlaps: false }),
  naive: job => ({ plan: job.sizes.map((_, param) => [param]), overlaps: false }),
  flat: job => ({ plan: [range(job.sizes.length)], overlaps: false }),
  overlapped: job => ({ plan: byReadiness(job.ready).map(param => [param]), overlaps: true }),
  bucketed: (job, caps) => ({ plan: fill(job.sizes, byReadiness(job.ready), caps), overlaps: true }),
};

/** A step by the settings `s`; the slowest rank decides, so the model has its times. */
function stepOf(s, constants, rung = "bucketed", given = null) {
  const job = s.job || jobOf(s, constants.backward_share);
  const link = { ...allReduce(s.ranks, { latency: s.latencyUs / 1e6, rate: s.rate * 1e9 }), taken: s.taken };
  const caps = s.capMib === null ? [constants.first_cap, constants.cap] : [s.capMib * MIB];
  const { plan, overlaps } = given ? { plan: given, overlaps: true } : RUNGS[rung](job, caps.map(Math.floor));
  const backward = s.slow * job.backward, sizes = job.sizes.map(size => size * s.wireBytes / 4);
  const ready = job.ready.map(at => overlaps ? s.slow * at : backward);
  const messages = messagesOf(plan, sizes, ready);
  const end = predicted(messages, link, backward), alone = job.forward + job.backward + job.rest;
  const computed = s.slow * (alone + (s.accumulate - 1) * (job.forward + job.backward));
  return {
    job, link, plan, messages, transfers: simulate(messages, link), backward, end, computed, ready, sizes,
    exposed: end - backward, length: computed + job.copy + end - backward,
    begin: s.slow * (s.accumulate * job.forward + (s.accumulate - 1) * job.backward),
  };
}

/** The time of day when backward has computed for `clock` seconds, as messages take their share of it. */
function wallOf(step, clock) {
  const taken = step.link.taken;
  const part = t => taken === 1 ? +(clock > t.clock) : Math.min(1, Math.max(0, (clock - t.clock) / ((1 - taken) * t.takes)));
  return clock + (taken ? sum(step.transfers.map(t => taken * t.takes * part(t))) : 0);
}

// ------------------------------------------------------------------ a recording of X-ray: reading.py, timeline.py, model.py

const BEGINS = {
  FORWARD_BEGIN: "forward", BUFFERS_BEGIN: "buffers", BUFFERS_BROADCAST: "forward", FORWARD_END: "loss",
  BACKWARD_BEGIN: "backward", GRADIENT_KEPT: "backward", GRADIENTS_COMPLETE: "blocked", BUCKET_WAITED: "copy",
  BUCKET_UNPACKED: "blocked", BACKWARD_END: "other", OPTIMIZER_BEGIN: "optimizer", OPTIMIZER_END: "other",
};
const AFTER_BACKWARD = ["BUCKET_LAUNCHED", "COMM_HOOK_RETURNED", "BUCKET_COMPLETED"];

/** The whole steps of one rank, each from a forward to the next. */
function stepsOfRank(rank) {
  const rebuilt = Math.max(0, ...rank.events.filter(e => e[1] === "BUCKETS_REBUILT").map(e => e[0])), found = [];
  let events = [], whole = false;
  const close = end => { if (whole) found.push({ events, end, rank: rank.rank, number: rank.first_step + found.length }); };
  for (const event of rank.events) {
    if (event[1] === "FORWARD_BEGIN" && (whole || !events.length)) [, events, whole] = [close(event[0]), [event], false];
    else if (event[1] === "ERROR") [events, whole] = [[], false];
    else if (events.length && !(whole && AFTER_BACKWARD.includes(event[1]))) {
      events.push(event);
      whole ||= event[1] === "BACKWARD_END" && events.some(e => e[1] === "GRADIENTS_COMPLETE");
    }
  }
  close(rank.stopped_ns);
  return found.filter(step => step.end > rebuilt).map(step => spansOf({ ...step, events: withWaits(step.events) }));
}

/** Torch's class reports no waits: each lasts until its bucket is complete. */
function withWaits(events) {
  const done = events.filter(e => e[1] === "BUCKET_COMPLETED").sort((a, b) => a[2] - b[2] || a[0] - b[0]);
  if (!done.length || events.some(e => e[1] === "BUCKET_WAITED")) return events;
  let now = events.findLast(e => e[1] === "GRADIENTS_COMPLETE")[0];
  const added = done.flatMap(([t, , bucket]) => ["BUCKET_WAITED", "BUCKET_UNPACKED"].map(kind => [now = Math.max(now, t), kind, bucket]));
  const place = e => ["BACKWARD_END", "OPTIMIZER_BEGIN", "OPTIMIZER_END"].includes(e[1]) ? 2 : e[1].startsWith("BUCKET_W") || e[1].startsWith("BUCKET_U") ? 1 : 0;
  return [...events, ...added.slice(0, -1)].sort((a, b) => a[0] - b[0] || place(a) - place(b));
}

function spansOf(step) {
  const spans = [], at = {};
  let activity = "forward", since = step.events[0][0], kept = null;
  const close = end => { if (end > since) spans.push({ activity, begin: since, end }); since = end; };
  for (const [t, kind, subject] of step.events) {
    (at[kind] ||= {})[subject] = t;
    if (kind === "GRADIENT_KEPT") kept = t;
    if (!BEGINS[kind] || BEGINS[kind] === activity) continue;
    if (kept !== null && activity === "backward") [, activity, kept] = [close(kept), "other", null];
    close(t);
    activity = BEGINS[kind];
  }
  close(step.end);
  const complete = at.GRADIENTS_COMPLETE[-1], begin = Math.max(...spans.filter(s => s.activity === "backward").map(s => s.begin));
  return { ...step, spans, at, complete, begin: step.events[0][0], backward: complete - begin, backwardBegin: begin };
}

const spent = (step, ...activities) => sum(step.spans.filter(s => activities.includes(s.activity)).map(s => s.end - s.begin));

/** When the wire was `free` for each bucket on one rank, and when it travelled: after all ranks had joined. */
function wiresOf(rank, all, world, addsAfter) {
  const arrived = b => (rank.at.BUCKET_COMPLETED || {})[b] ?? (rank.at.BUCKET_WAITED || {})[b];
  return range(rank.plan.length).map(b => {
    const launches = all.map(r => (r.at.BUCKET_LAUNCHED || {})[b]).filter(t => t !== undefined), launched = (rank.at.BUCKET_LAUNCHED || {})[b];
    const end = arrived(b), latest = Math.max(...launches) + addsAfter;
    if (launched === undefined || end === undefined) return null;
    const joined = launches.length < world ? launched : Math.round(Math.max(...launches.map((t, i) => Math.max(t, Math.min(all[i].complete, latest)))));
    const free = Math.min(Math.max(launched, ...range(b).map(e => arrived(e) || 0)), end);
    return { free, begin: Math.min(Math.max(joined, free), end), end };
  });
}

/** What `job_of_recording` of forecast_command.py reads from a recording: the median job, a hop, and the typical step. */
function readRecording(data, constants) {
  if (data.format !== constants.format) throw new Error(`This recording has format ${data.format}, this page reads ${constants.format}: record it again.`);
  const { params, buckets: plan } = data.ranks[0].plan, world = data.ranks[0].world_size, byNumber = {};
  const sizes = params.map(p => p.numel * (constants.itemsize[p.dtype] || 4));
  for (const rank of data.ranks) for (const step of stepsOfRank(rank)) (byNumber[step.number] ||= []).push({ ...step, plan: rank.plan.buckets });
  const steps = Object.values(byNumber), length = ranks => Math.max(...ranks.map(r => r.end - r.begin));
  if (!steps.length) throw new Error("There is no whole step in this recording.");
  const typical = [...steps].sort((a, b) => length(a) - length(b))[Math.floor((steps.length - 1) / 2)], times = {};
  let fitted = 0, seen = 0;
  for (const ranks of steps) for (const rank of ranks) {
    rank.wires = wiresOf(rank, ranks, world, data.ranks[0].adds_after_ns);
    rank.wires.forEach((w, b) => { if (w && w.end > w.begin) (times[sum(plan[b].map(p => sizes[p]))] ||= []).push((w.end - w.begin) / 1e9); });
  }
  const points = Object.entries(times).map(([nbytes, all]) => [Number(nbytes), median(all)]).sort((a, b) => a[0] - b[0]);
  const seesLink = points.length > 0 && world > 1, apart = seesLink && points.at(-1)[0] >= constants.sizes_apart * points[0][0];
  const fit = apart ? fitLink(points, constants.least_s_per_byte)
    : { latency: 0, rate: sum(points.map(p => p[0])) / sum(points.map(p => p[1])), taken: 0 };
  for (const rank of typical) rank.wires.forEach((w, b) => {
    if (w) [fitted, seen] = [fitted + seconds(fit, sum(plan[b].map(p => sizes[p]))), seen + (w.end - w.begin) / 1e9];
  });
  const ratio = fitted ? Math.max(1e-6, seen / fitted) : 1, alike = steps.filter(s => s.length === typical.length).flat();
  const mid = f => median(alike.map(f)) / 1e9, backward = mid(r => r.backward);
  const ready = sizes.map((_, p) => median(alike.map(r => {
    const t = (r.at.PARAM_READY || {})[p];
    return t === undefined ? backward : (t - r.backwardBegin) / 1e9;
  })));
  const alone = mid(r => spent(r, "forward", "loss", "backward", "optimizer", "other")), forward = mid(r => spent(r, "forward", "loss"));
  return {
    title: data.title, plan, typical, world, measured: median(alike.map(r => r.end - r.begin)) / 1e9,
    hop: seesLink ? hopOf({ latency: fit.latency * ratio, rate: fit.rate / ratio }, world) : null,
    job: { names: params.map(p => p.name), sizes, ready, backward, forward, rest: alone - forward - backward, copy: mid(r => spent(r, "copy")), layers: 0 },
  };
}

if (typeof module !== "undefined") module.exports = { stepOf, planBuckets, readRecording, RUNGS, jobOf, predicted, messagesOf, allReduce, wallOf };
