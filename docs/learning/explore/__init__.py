"""A page to try data parallelism out: one file, which needs no network and no library.

    python -m docs.learning.explore      # writes docs/learning/explore.html

| file | contains |
|---|---|
| `model.js` | the model of a step, as in `minddp/tools/forecast`, and what X-ray reads from a recording |
| `views.js` | the six parts of the page, and their controls |
| `page.html`, `page.css` | the text of the page, and its look |

Everything else on the page is computed here, when it is built: constants and speeds of links, which are those of
`forecast`; lines of minddp, quoted from the source; each step of an all-reduce, by symbolic gradients that record
which ranks are in a sum (`provenance.py`). A test drives model.js and `forecast` by the same settings and compares.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from docs import forecast
from docs.learning import recorded
from docs.learning.provenance import Source, Symbol
from docs.learning.quotes import ROOT, source_of
from minddp.options import MIB, BucketCaps
from minddp.tools.forecast.link import FREE, LEAST_S_PER_BYTE, Link, all_reduce, fit_link, hop_of
from minddp.tools.forecast.planner import HALVINGS
from minddp.tools.xray.forecast_command import GBIT, job_of_recording
from minddp.tools.xray.model import SIZES_APART
from minddp.tools.xray.recording import FORMAT, Recording
from minddp.tools.xray.result import RECORDING
from minddp.tools.xray.timeline import Activity
from reference.collectives import tree
from reference.ring import Plan, Step, Transfer, carry_out, ring

FOLDER = Path(__file__).parent
PAGE = FOLDER.with_suffix(".html")
MOST_RANKS = 8
LINES = 5  # of code above and below the one that acts

_PASS = "minddp/core/backward_pass.py"
_SHARED = "minddp/transport/shared_memory/collectives.py"
#: For each moment and part of the page: the file, the function that acts, and a part of its line.
ACTS = {
    "FORWARD_BEGIN": ("minddp/ddp.py", "DistributedDataParallel._run_module", "self.module("),
    "BACKWARD_BEGIN": ("minddp/core/reducer.py", "Reducer._begin_pass", ".begin("),
    "GRADIENT_KEPT": ("minddp/core/reducer.py", "Reducer._on_hook", "GRADIENT_KEPT"),
    "PARAM_READY": (_PASS, "BackwardPass.mark_ready", "ready_order.append"),
    "BUCKET_READY": (_PASS, "BackwardPass._pack_group", ".pack("),
    "BUCKET_LAUNCHED": (_PASS, "BackwardPass._launch", ".launch("),
    "BUCKET_COMPLETED": (_PASS, "BackwardPass._launch", "EventKind.BUCKET_COMPLETED"),
    "BUCKET_WAITED": (_PASS, "BackwardPass.wait_and_unpack", ".result()"),
    "BUCKET_UNPACKED": (_PASS, "BackwardPass.wait_and_unpack", "bucket.unpack("),
    "no wrapper": ("reference/interface.py", "DataParallel.forward", "self.module("),
    "naive": ("reference/naive.py", "Naive.synchronize", ".wait()"),
    "flat": ("reference/flat.py", "Flat.synchronize", ".wait()"),
    "overlapped": ("reference/overlapped.py", "Overlapped.on_grad_accumulated", "wire.average"),
    "bucketed": ("reference/bucketed.py", "Bucketed.launch_ready_buckets", "self.launch("),
    "rebuild": ("minddp/core/bucket_store.py", "BucketStore.rebuild_if_due", "plan_from_readiness"),
    "ring": ("reference/ring.py", "ring", "chunks ="),
    "tree": ("reference/collectives.py", "tree", "Transfer("),
    "shared memory": (_SHARED, "all_reduce", "all_reduce_chunk"),
}


def code_of(key: str) -> dict[str, Any]:
    """The function of a moment, the lines around the one that acts, and the place of that one among them.

    Raises:
        LookupError: the source has changed.
    """
    file, function, part = ACTS[key]
    lines = source_of(ROOT / file, function).splitlines()
    acting = next((number for number, line in enumerate(lines) if part in line), None)
    if acting is None:
        raise LookupError(f"{file}: `{function}` has no line with `{part}`.")
    first = max(0, acting - LINES)
    return {"where": f"{file}: {function}", "lines": lines[first : acting + LINES + 1], "acts": acting - first}


def constants() -> dict[str, Any]:
    """Numbers of the package that the model in the browser has, too."""
    first_cap, cap = BucketCaps.from_mib(None, None).after_rebuild()
    names = ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")  # else 4
    return {
        "first_cap": first_cap,
        "cap": cap,
        "halvings": HALVINGS,
        "least_s_per_byte": LEAST_S_PER_BYTE,
        "sizes_apart": SIZES_APART,
        "format": FORMAT,
        "key": RECORDING,
        "itemsize": {name: getattr(torch, name).itemsize for name in names},
        "backward_share": forecast.BACKWARD,
    }


# ---------------------------------------------------------------------- where a reader can begin


def presets() -> dict[str, dict[str, Any]]:
    """Settings of the page. Speeds are those of docs/forecast.md, and measured ones of gloo."""
    bert = {"ranks": 8, "layers": 24, "width": round(12.6e6**0.5), "embeddingMib": 4 * 31.8e6 / MIB}
    bert["layerMs"] = 1e3 * forecast.BACKWARD * 2 / forecast.IMAGES_PER_S["BERT-large, V100"] / 24
    nvlink = Link(forecast.HOP_US["NVLink"] / 1e6, forecast.INSIDE_GBYTE["NVLink"] * 1e9)
    network = Link(forecast.HOP_US["network"] / 1e6, 100 * GBIT * forecast.GOODPUT)
    sizes = json.loads((forecast.RESULTS / "all_reduce.json").read_text())["sizes"]
    gloo = hop_of(fit_link({1024 * one["kib"]: one["median_ms"]["process group"] / 1e3 for one in sizes}), 2)
    small = {"ranks": 2, "layers": 8, "width": 512, "layerMs": 2.0, "taken": 0.5}
    return {
        "a first model, 4 ranks": settings(Link(2e-4, 5e9), capMib=25, ranks=4, layers=24, width=1024, layerMs=2.0),
        "BERT-large, 8 V100 by NVLink": settings(nvlink, **bert),
        "BERT-large, 8 hosts at 100 Gbit/s": settings(network, **bert),
        "a small network, 2 CPU ranks by gloo": settings(gloo, **small),
    }


def settings(hop: Link, **changes: Any) -> dict[str, Any]:
    usual = {"capMib": None, "slow": 1, "taken": 0, "embeddingMib": 0, "accumulate": 1, "wireBytes": 4}
    # A fitted hop depends on the machine's linear algebra in its last digit.
    return usual | {"rate": round(hop.bytes_per_s / 1e9, 9), "latencyUs": round(1e6 * hop.latency_s, 6)} | changes


# ---------------------------------------------------------------------- all-reduces, by provenance


def shared_memory(n: int) -> Plan:
    """Rank r adds chunk r of all buffers, which it can reach. See [Note: all-reduce in shared memory]."""
    others = [(rank, owner) for owner in range(n) for rank in range(n) if rank != owner]
    reads = tuple(Transfer(rank, owner, range(owner, owner + 1)) for rank, owner in others)
    writes = tuple(Transfer(owner, rank, range(owner, owner + 1)) for rank, owner in others)
    adds = Step("reduce: each rank adds its own chunk of all buffers", reads)
    return Plan(n, [adds, Step("copy: each rank writes its sum into all buffers", writes)])


def steps_of(plan: Plan, ranks: int) -> dict[str, Any]:
    """Each step of an all-reduce: what is sent, and for each chunk of each rank the ranks in it, as bits.

    Raises:
        ValueError: a gradient counts more than once.
    """
    own = [Symbol({Source(rank, 0, "gradient"): Fraction(1)}) for rank in range(ranks)]
    inputs = [np.array([symbol] * plan.chunks) for symbol in own]
    steps: list[dict[str, Any]] = [{"phase": "", "transfers": [], "most": 0, "masks": masks(inputs)}]
    sent = Counter[int]()
    run = carry_out(plan, inputs)
    for step in run.steps:
        moved = [(t.sender, t.receiver, chunk) for t in step.transfers for chunk in t.chunks]
        by_rank = Counter(sender for sender, _, _ in moved)
        sent += by_rank
        most = max(by_rank.values())
        steps.append({"phase": step.phase, "transfers": moved, "most": most, "masks": masks(step.buffers)})
    return {"chunks": plan.chunks, "steps": steps, "sent": max(sent.values()) / plan.chunks}


def masks(buffers: Sequence[np.ndarray]) -> list[list[int]]:
    if any(count != 1 for buffer in buffers for symbol in buffer for count in symbol.counts.values()):
        raise ValueError("A gradient counts more than once.")
    return [[sum(1 << source.rank for source in symbol.counts) for symbol in buffer] for buffer in buffers]


# ---------------------------------------------------------------------- the page


def errors() -> dict[str, float]:
    """For each recorded step its length by the model as a share of the recorded one, minus 1. Means over ranks."""
    found = {}
    for result in recorded.results():
        job, hop = job_of_recording(result.analysis)
        step = result.analysis.typical
        predicted_s = job.step_s(all_reduce(step.world_size, 1, hop, FREE))
        copy_s = recorded.spent_ns(step, Activity.COPY_BACK) / 1e9
        found[recorded.name_of(result)] = (predicted_s + copy_s) / (recorded.length_ns(step) / 1e9) - 1
    return found


def page(recording: Recording, title: str, rings: Sequence[Any] = (), *, is_own: bool = False) -> str:
    """The whole page. `rings` (of `own_run.py`) show an element of each bucket; an own recording comes first."""
    makers, offered = {"ring": ring, "tree": tree, "shared memory": shared_memory}, presets()
    ranks, off = range(2, MOST_RANKS + 1), [*map(abs, errors().values())]
    data = {
        "constants": constants(),
        "presets": offered,
        "start": next(iter(offered.values())),
        "code": {key: code_of(key) for key in ACTS},
        "collectives": {name: [steps_of(make(n), n) for n in ranks] for name, make in makers.items()},
        "recording": recording.to_dict(),
        "rings": list(rings),
        "own": is_own,
    }
    error = f"{median(off):.0%} as the median and {max(off):.0%} at worst"
    parts = {
        "TITLE": html.escape(title),
        "CHECKED": f"On {len(off)} recorded steps, each with its own times, the error is {error}.",
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # or a name could end the script
        "CSS": (FOLDER / "page.css").read_text(),
        "MODEL": (FOLDER / "model.js").read_text(),
        "VIEWS": (FOLDER / "views.js").read_text(),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], (FOLDER / "page.html").read_text())


def build() -> str:
    """The content of `PAGE`: minddp's recorded step is its example."""
    example = next(result for result in recorded.results() if recorded.name_of(result) == "minddp")
    return page(example.recording, "Explore data parallelism")
