"""Tiny runs for the tests: a model of a few thousand parameters that trains a step in milliseconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minddp.train.checkpoint import Checkpoint
from minddp.train.loop import train
from minddp.train.settings import GPTOptions, Settings
from minddp.train.world import World

TINY_GPT = GPTOptions(layers=1, heads=2, width=16, context=8, dropout=0.2, corpus_mib=1)


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
        gpt=TINY_GPT,
    )
    return dataclasses.replace(settings, **changes)


def command_line(settings: Settings) -> list[str]:
    """The arguments of `minddp train` that make these settings."""
    words = []
    for options in (settings, settings.gpt, settings.wrapper):
        for field in dataclasses.fields(options):
            value, default = getattr(options, field.name), field.default
            if value == default or dataclasses.is_dataclass(value):
                continue
            flag = "--" + field.name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
    return words


def world_here(rank: int) -> World:
    """The world of a rank whose group is there already."""
    return World(rank, dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)


def train_here(rank: int, settings: Settings) -> str:
    """A whole run, as one of a pool's ranks; returns why it ended."""
    return train(settings, world_here(rank))


def final_bits(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint that two equal runs must share: weights, buffers, optimizer, generators, place."""
    checkpoint = Checkpoint.load(folder / "checkpoint.pt")
    fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
    del fields["elapsed_s"]
    return fields


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
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == kind]
    return [{k: v for k, v in record.items() if k not in ("elapsed_s", "targets_per_s")} for record in found]
