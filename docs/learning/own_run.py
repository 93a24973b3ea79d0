"""Step through a backward of your own: one page in one file, which needs no network.

    python -m docs.learning.own_run page.html script.py ARGS

This runs the script on two ranks with minddp, and records one step by X-ray, with the values of its buckets before
and after the all-reduce (`own_values.py`). Each moment has a picture of the buckets, the line of minddp that acts,
and a sentence; while a bucket travels, the steps of a ring with the numbers of one of its elements.
"""

from __future__ import annotations

import argparse
import html
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from docs.learning.own_values import Values, values_in
from docs.learning.quotes import ROOT, source_of
from docs.learning.recorded import typical_step_of
from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, BucketSpec
from minddp.tools.xray import words
from minddp.tools.xray.recording import RankRecording
from minddp.tools.xray.result import Result, load
from reference.ring import ring_all_reduce

PAGE = Path(__file__).with_name("own_run.html")
FILE = "minddp/core/backward_pass.py"

#: The function that acts, and a part of its line, for each kind of event that the page shows.
ACTS = {
    EventKind.PARAM_READY: ("BackwardPass.mark_ready", "ready_order.append"),
    EventKind.BUCKET_READY: ("BackwardPass._pack_group", ".pack("),
    EventKind.BUCKET_LAUNCHED: ("BackwardPass._launch", ".launch("),
    EventKind.BUCKET_COMPLETED: ("BackwardPass._launch", "EventKind.BUCKET_COMPLETED"),
    EventKind.BUCKET_WAITED: ("BackwardPass.wait_and_unpack", ".result()"),
    EventKind.BUCKET_UNPACKED: ("BackwardPass.wait_and_unpack", "bucket.unpack("),
}


def page_of(result: Result, values: Sequence[Values] = (), rank: int = 0) -> str:
    """The typical step of a recording, as `rank` saw it; `values` are those of all ranks in this step."""
    recording = typical_step_of(result.recording)
    seen = next((one for one in recording.ranks if one.rank == rank), None)
    if seen is None:
        raise ValueError(f"Rank {rank} is not in the recording. There are {[one.rank for one in recording.ranks]}.")
    plan = seen.plan
    title = f"{recording.title or 'a recorded step'}, rank {rank} of {seen.world_size}"
    data = {
        "buckets": [
            {"size": words.size(bucket.nbytes), "params": [slot.param for slot in bucket.slots]}
            for bucket in plan.buckets
        ],
        "params": [param.name for param in plan.params],
        "moments": list(moments(seen, plan)),
        "code": {kind.name: code_of(kind) for kind in ACTS},
        "rings": [ring_of(bucket, plan, values) for bucket in plan.buckets],
    }
    text = json.dumps(data).replace("<", "\\u003c")  # or a name could end the script that holds it
    return PAGE.read_text().replace("{{TITLE}}", html.escape(title)).replace("{{DATA}}", text)


def moments(seen: RankRecording, plan: BucketPlan) -> Iterator[dict[str, Any]]:
    for t_ns, kind, subject in seen.events:
        if kind in ACTS:
            yield {
                "ms": round(t_ns / 1e6, 3),
                "kind": kind.name,
                "subject": subject,
                "says": says(kind, subject, plan),
            }


def says(kind: EventKind, subject: int, plan: BucketPlan) -> str:
    if kind is EventKind.PARAM_READY:
        return f"The gradient of {plan.params[subject].name} is complete."
    return {
        EventKind.BUCKET_READY: f"Bucket {subject} is full: all of its gradients are packed into it.",
        EventKind.BUCKET_LAUNCHED: f"The all-reduce of bucket {subject} begins, and backward goes on.",
        EventKind.BUCKET_COMPLETED: f"Bucket {subject} holds the averages. Nothing has waited for that yet.",
        EventKind.BUCKET_WAITED: f"The wait for bucket {subject} is over.",
        EventKind.BUCKET_UNPACKED: f"The averages of bucket {subject} are in .grad, for the optimizer.",
    }[kind]


def code_of(kind: EventKind) -> dict[str, Any]:
    """The function, and the number of its line that acts.

    Raises:
        LookupError: the source has changed.
    """
    function, part = ACTS[kind]
    lines = source_of(ROOT / FILE, function).splitlines()
    acting = [number for number, line in enumerate(lines) if part in line]
    if not acting:
        raise LookupError(f"{FILE}: `{function}` has no line with `{part}`.")
    return {"where": f"{FILE}: {function}", "lines": lines, "acts": acting[0]}


def ring_of(bucket: BucketSpec, plan: BucketPlan, values: Sequence[Values]) -> dict[str, Any] | None:
    """One element of a bucket, the largest of rank 0's, on every rank: as it was, and after each step of a ring."""
    of_rank = [rank.of_bucket[bucket.index] for rank in values if bucket.index in rank.of_bucket]
    if not of_rank or len(of_rank) < len(values):
        return None
    largest = [gradient.abs().max() for gradient in of_rank[0].before]
    k = int(torch.stack(largest).argmax())
    place = int(of_rank[0].before[k].abs().argmax())
    before = [gradients.before[k].reshape(-1)[place].item() for gradients in of_rank]
    after = [gradients.after[k].reshape(-1)[place].item() for gradients in of_rank]

    n = len(before)
    chunk = (bucket.slots[k].offset + place) * n // bucket.numel
    run = ring_all_reduce([np.full(n, value, dtype=np.float32) for value in before])
    rows = [{"step": f"gradient / {n}", "values": before, "to": -1}]
    for number, step in enumerate(run.steps, start=1):
        [transfer] = [t for t in step.transfers if chunk in t.chunks]
        found = [float(buffer[chunk]) for buffer in step.buffers]
        rows.append({"step": f"{number}, {step.phase}", "values": found, "to": transfer.receiver})
    rows.append({"step": ".grad, averaged", "values": after, "to": -1})
    index = np.unravel_index(place, of_rank[0].before[k].shape)
    name = f"{plan.params[bucket.slots[k].param].name}[{', '.join(map(str, index))}]"
    return {"element": name, "chunk": chunk, "rows": rows}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m docs.learning.own_run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many processes (%(default)s)")
    parser.add_argument("--step", type=int, default=5, help="which step is recorded, from 0 (%(default)s)")
    parser.add_argument("page", type=Path, help="the file to write, .html")
    parser.add_argument("script", help="a training script that uses DistributedDataParallel")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="own-run-") as folder:
        program = ["-m", "docs.learning.own_values", folder, str(options.step), options.script, *options.arguments]
        run = [
            sys.executable,
            "-m",
            "minddp",
            "run",
            "--standalone",
            "--nproc-per-node",
            str(options.ranks),
            *program,
        ]
        done = subprocess.run(run, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{options.script} has failed, so there is no page.")
        if not Path(folder, "step.json").exists():
            raise SystemExit(
                f"{options.script} never came to step {options.step}, so there is no page. Choose --step."
            )
        result = load(Path(folder, "step.json"))
        options.page.write_text(page_of(result, values_in(folder, options.ranks)), encoding="utf-8")
    print(f"{options.page}: open it in a browser.")


if __name__ == "__main__":
    main(sys.argv[1:])
