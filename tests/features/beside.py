"""One script played twice in the same worker: with torch's wrapper and with minddp's. What they leave is compared.

A script is a function `script(wrap, rank, *args)`. It builds its model anew, wraps it by calling `wrap`, trains,
and after every step yields a `snapshot`, or returns a list of them. `play` demands equal bits of every tensor in
every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.tools.launch.on_cpu.cuda import CpuEvent, Stream
from tests.parity.compare import difference

Snapshot = dict[str, torch.Tensor | None]
Trail = list[Snapshot]
Steps = Iterator[Snapshot]
Wrap = Callable[..., Any]


def play(
    rank: int, script: Callable[..., Iterable[Snapshot]], *args: Any, ours: dict[str, Any] | None = None
) -> Trail:
    """Play `script` on both sides; `ours` are further arguments for minddp's wrapper. Returns minddp's trail.

    Raises:
        AssertionError: the first step that differs, and what differs in it.
    """
    theirs = list(script(TorchDDP, rank, *args))
    trail = list(script(lambda *a, **k: minddp.DistributedDataParallel(*a, **k, **(ours or {})), rank, *args))
    assert_same(theirs, trail, f"rank {rank}")
    return trail


def play_over(rank: int, transport: str, script: Callable[..., Iterable[Snapshot]], *args: Any) -> Trail:
    """The same, where minddp's gradients travel over another transport."""
    return play(rank, script, *args, ours={"transport": transport})


def assert_same(theirs: Trail, ours: Trail, where: str) -> None:
    assert theirs, "a script without steps proves nothing"
    assert len(theirs) == len(ours), f"{where}: torch went through {len(theirs)} steps, minddp {len(ours)}"
    for step, (expected, got) in enumerate(zip(theirs, ours, strict=True)):
        assert expected.keys() == got.keys(), f"{where}, step {step}: {expected.keys() ^ got.keys()}"
        found = {name: difference(expected[name], got[name]) for name in expected}
        found = {name: what for name, what in found.items() if what}
        assert not found, f"{where}, step {step}: {found}"


def snapshot(ddp: nn.Module, **more: torch.Tensor) -> Snapshot:
    """Copies of all parameters, gradients and buffers; a sparse gradient as its indices and its values."""
    taken: Snapshot = {name: tensor.detach().clone() for name, tensor in more.items()}
    for name, param in ddp.named_parameters():
        taken[name] = param.detach().clone()
        grad = param.grad
        if grad is not None and grad.is_sparse:
            taken[f"{name}.grad indices"] = grad._indices().clone()
            taken[f"{name}.grad values"] = grad._values().clone()
            taken[f"{name}.grad is coalesced"] = torch.tensor(grad.is_coalesced())
        else:
            taken[f"{name}.grad"] = None if grad is None else grad.clone()
    taken |= {name: buffer.clone() for name, buffer in ddp.named_buffers()}
    return taken


def random(*shape: int, rank: int = 0, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Input of a step, another one on each rank."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1000 * step + rank))


@contextmanager
def streams_of_a_cpu() -> Iterator[None]:
    """Within, there are streams, for which torch's wrapper asks even where there is only a CPU. They do nothing."""
    with (
        mock.patch("torch.Stream", Stream),
        mock.patch("torch.Event", CpuEvent),
        mock.patch("torch.accelerator.current_stream", return_value=Stream()),
    ):
        yield
