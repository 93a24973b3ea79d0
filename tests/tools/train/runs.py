"""Tiny runs for the tests: a model of a few thousand parameters that trains a step in milliseconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minddp.tools.train.checkpoint import CheckpointFiles
from minddp.tools.train.loop import train
from minddp.tools.train.settings import Settings
from minddp.tools.train.world import World

# Fields of records that differ between two equal runs.
BY_THE_CLOCK = ("targets_per_s", "memory_mib")
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


def assert_same_bits(one: Any, other: Any, where: str = "checkpoint") -> None:
    """Compare nested containers; tensors bit by bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert one.numpy().tobytes() == other.numpy().tobytes(), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}[{i}]")
    else:
        assert one == other, where


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl, without what depends on the clock."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be on its way
    found = [record for record in found if record["kind"] == kind]
    return [{k: v for k, v in record.items() if k not in BY_THE_CLOCK} for record in found]
