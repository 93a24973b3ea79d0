"""Step through a backward of your own: one page in one file, which needs no network.

    python -m docs.learning.own_run page.html script.py ARGS

This runs the script on two ranks with minddp, and records one step by X-ray, with the values of its buckets before
and after the all-reduce (`own_values.py`). It is the page of `explore/`, which begins with this recording. Each
moment has both ranks, the buckets on their way, and the line of minddp that acts; while a bucket travels, also the
steps of a ring with the numbers of one of its elements. The other parts of the page can take over the model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from docs.learning import explore
from docs.learning.own_values import Values, values_in
from docs.learning.recorded import typical_step_of
from minddp.core.plan import BucketPlan, BucketSpec
from minddp.tools.xray.result import Result, load
from reference.ring import ring_all_reduce


def page_of(result: Result, values: Sequence[Values] = ()) -> str:
    """The page of the typical step of a recording; `values` are those of all ranks in this step."""
    recording = typical_step_of(result.recording)
    title = f"{recording.title or 'A recorded step'}, step by step"
    rings = [ring_of(bucket, recording.ranks[0].plan, values) for bucket in recording.ranks[0].plan.buckets]
    return explore.page(recording, title, rings, is_own=True)


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
