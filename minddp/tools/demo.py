"""`minddp demo`: train a GPT on two CPU ranks, then compare its first steps with torch's DDP."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import tyro

from minddp.tools.job.launcher import launch

RANKS = 2
WRAPPERS = ("torch", "minddp")


def main(arguments: Sequence[str]) -> int:
    return tyro.cli(demo, prog="minddp demo", args=list(arguments))


def demo(steps: int = 1500, repeated_steps: int = 48, out: Path = Path("runs/demo")) -> int:
    """Train a small GPT for about a minute, then repeat its first steps with torch's DDP and compare all bits.

    Exit status 1 if the bits differ.

    Args:
        steps: Steps to train.
        repeated_steps: Steps that are repeated with each wrapper.
        out: Folder for the three runs; replaces the runs of an earlier demo.
    """
    print(f"1. Train on {RANKS} ranks", flush=True)
    train(out / "whole", "--steps", str(steps))
    for wrapper in WRAPPERS:
        print(f"2. The first steps again, with the DDP of {wrapper}", flush=True)
        train(out / wrapper, "--steps", str(repeated_steps), "--ddp", wrapper)
    found = differences(*(out / wrapper for wrapper in WRAPPERS))
    equal = f"yes, after {repeated_steps} steps: all parameters and the state of the optimizer"
    print(f"3. Bits equal: {'NO: ' + ', '.join(found[:5]) if found else equal}")
    return int(bool(found))


def train(out: Path, *words: str) -> None:
    """Run `minddp train` on the CPU with these arguments."""
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    launch(RANKS, "minddp", ["train", *words, "--out", str(out), "--device", "cpu"])


def differences(one: Path, other: Path) -> list[str]:
    """The names of the parameters and optimizer states that differ between two runs."""
    from torch import Tensor
    from torch.utils._pytree import keystr, tree_flatten_with_path

    from minddp.tools.train.checkpoint import CheckpointFiles, load

    found = []
    states = [load(CheckpointFiles(folder, keep=1).paths()[0]) for folder in (one, other)]
    for name in ("model", "optimizer"):
        leaves = [tree_flatten_with_path(state[name])[0] for state in states]
        for (where, a), (_, b) in zip(*leaves, strict=True):
            is_equal = a.numpy().tobytes() == b.numpy().tobytes() if isinstance(a, Tensor) else a == b
            found += [] if is_equal else [name + keystr(where)]
    return found
