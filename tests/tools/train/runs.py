"""Tiny runs for the tests: a model of a few thousand parameters that trains a step in milliseconds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path

from minddp.tools.train.checkpoint import CheckpointFiles
from minddp.tools.train.loop import train
from minddp.tools.train.settings import Settings
from minddp.tools.train.world import World
from tests.tools.launch import jobs

BY_THE_CLOCK = "targets_per_s"  # the field of records that differs between two equal runs
TINY_GPT = ("layers=1", "heads=2", "width=16", "context=8", "corpus_mib=1")


def tiny(out: Path, **changes: Any) -> Settings:
    """Settings of a tiny GPT run on the CPU, with `changes`."""
    settings = Settings(
        out=out,
        device="cpu",
        steps=6,
        batch_size=2,
        warmup_steps=2,
        log_every=1,
        validation_samples=6,
        task_options=(*TINY_GPT, "dropout=0.2"),
    )
    return dataclasses.replace(settings, **changes)


def command_line(settings: Settings) -> list[str]:
    """The arguments of `minddp train` that make these settings."""
    words = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            words.append("--" + field.name.replace("_", "-"))
            words += [] if value is True else map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


def world_here(rank: int) -> World:
    """The world of a rank whose group is there already."""
    return World(rank, dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)


def train_here(rank: int, settings: Settings) -> str:
    """A whole run, as one of a pool's ranks; returns why it ended."""
    return train(settings, world_here(rank))


def final_bits(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint that two equal runs must share: weights, buffers, optimizer, generators, place."""
    state = CheckpointFiles(folder, keep=1).newest()
    assert state is not None
    return state


def assert_same_bits(one: Any, other: Any) -> None:
    """Compare nested containers; tensors bit by bit."""
    (leaves, shape), (others, other_shape) = map(tree_flatten_with_path, (one, other))
    assert shape == other_shape
    for (where, a), (_, b) in zip(leaves, others, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), keystr(where)
            a, b = a.numpy().tobytes(), b.numpy().tobytes()
        assert type(a) is type(b), keystr(where)
        assert a == b, keystr(where)


def start(settings: Settings, *launcher: str, **variables: str) -> subprocess.Popen[str]:
    """`minddp train`, under a launcher if one is given."""
    return jobs.start("train", *command_line(settings), launcher=launcher or (sys.executable,), **variables)


def end_of(*processes: subprocess.Popen[str]) -> tuple[list[int], str]:
    """The exit statuses, and all outputs."""
    ends = [jobs.end_of(process) for process in processes]
    return [end.returncode for end in ends], "\n".join(end.stdout + end.stderr for end in ends)


def wait_for_records(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until that many training records are written."""
    deadline = time.monotonic() + jobs.PATIENCE_S
    while len(records(folder, "training")) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.02)


def children_of(process: subprocess.Popen[Any]) -> list[int]:
    """Of a launcher, its ranks in order."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl, without what depends on the clock."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be on its way
    found = [record for record in found if record["kind"] == kind]
    return [{k: v for k, v in record.items() if k != BY_THE_CLOCK} for record in found]
