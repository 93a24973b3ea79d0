"""`python -m benchmarks.gpu`: part after part, each in processes of its own, each written as soon as it is done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import benchmarks.gpu
from benchmarks import results
from benchmarks.display import console_of
from benchmarks.gpu import steps, tables
from benchmarks.gpu.card import described
from benchmarks.gpu.models import NAMES
from benchmarks.launch import DeviceName, run_ranks

PARTS = NAMES


def main(argv: Sequence[str] | None = None) -> int:
    options = _parsed(argv)
    console = console_of()
    if not (options.rehearse or torch.cuda.is_available()):
        console.print("No NVIDIA GPU here: nothing was measured.")
        return 0
    device: DeviceName = "cpu" if options.rehearse else "cuda"
    world_size = 1 if options.rehearse else torch.cuda.device_count()
    report = results.read(options.out) or {"parts": {}}
    report |= {"question": "what a wrapper adds to a step on a GPU", "machine": described(device)}
    for part in options.parts or PARTS:
        limits: dict[str, Any] = {"world_size": world_size, "threads": 1, "timeout_s": options.timeout_s}
        done, *_ = run_ranks(steps.measure, part, options, device, device=device, **limits)
        report["parts"][part] = done
        results.write(report, options.out)
        tables.of_steps(done, console)
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"by default all of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=16, help="timed rounds")
    parser.add_argument("--warmup-rounds", type=int, default=2, help="rounds that are thrown away")
    parser.add_argument("--race-s", type=float, default=120, help="no further round begins after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=results.path_of("gpu"))
    parser.add_argument("--timeout-s", type=float, default=600, help="of each part: its ranks are ended then")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, to see that all runs")
    options = parser.parse_args(argv)
    if options.rehearse:
        options.rounds, options.warmup_rounds = 4, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
