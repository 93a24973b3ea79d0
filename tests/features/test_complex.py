"""Complex parameters: reduced as pairs of real numbers, with the same bits as torch's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import minddp
from tests.features.beside import Trail, Wrap, play, play_over, random, snapshot
from tests.ranks import on_ranks


class Waves(nn.Module):
    """Complex layers between real ones. One weight is transposed, one has a shape of ones and one is a number."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        real = dtype.to_real()
        self.first = nn.Linear(6, 6, dtype=real)
        self.waves = nn.Parameter(torch.randn(6, 4, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(5, 4, dtype=dtype).t())
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.images = nn.Parameter(
            torch.randn(2, 3, 1, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
        )
        self.last = nn.Linear(5, 2, dtype=real)

    def forward(self, x: torch.Tensor, leave_out: bool = False) -> torch.Tensor:
        y = self.first(x).to(self.waves.dtype) @ self.waves @ self.turned * self.phase
        if not leave_out:
            y = y + self.images.sum((0, 1, 2))
        return torch.tanh(self.last(y.abs()) + self.last(y.real))


def hook_that_notes(seen, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Torch's all-reduce hook; `seen` grows by what it is shown."""
    seen += [float(bucket.buffer().is_complex()), float(bucket.buffer().numel()), float(bucket.is_last())]
    return default_hooks.allreduce_hook(None, bucket)


def train(wrap: Wrap, rank: int, dtype: torch.dtype, case: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    model = Waves(dtype)
    ddp = wrap(model, **case.get("options", {}))
    seen: list[Any] = []
    if case.get("hook"):
        ddp.register_comm_hook(seen, hook_that_notes)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    trail = []
    for step in range(5):
        x = random(3, 6, rank=rank, step=step, dtype=dtype.to_real())
        with ddp.no_sync() if step == 2 else nullcontext():
            loss = ddp(x, *([rank == 0] if case.get("leaves_out") else [])).square().sum()
            loss.backward()
        trail.append(snapshot(ddp, seen=torch.tensor(seen)))
        if step != 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    return trail


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"options": {"gradient_as_bucket_view": True}},
    "batched": {"options": {"batched_grad_copy": True}},
    "batched views": {"options": {"gradient_as_bucket_view": True, "batched_grad_copy": True}},
    "small buckets": {"options": {"bucket_cap_mb": 0.0001}},
    "static graph": {"options": {"static_graph": True}},
    "unused": {"options": {"find_unused_parameters": True}, "leaves_out": True},
    "hook": {"hook": True},
}


@pytest.mark.parametrize(
    ("dtype", "world_size"), [(torch.complex64, 2), (torch.complex64, 3), (torch.complex128, 3)]
)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_torchs(ranks: Any, case: str, dtype: torch.dtype, world_size: int) -> None:
    for trail in ranks(world_size).run(play, train, dtype, CASES[case]):
        assert trail[0]["module.waves.grad"].is_complex()


@pytest.mark.parametrize("case", ["plain", "views", "hook"])
def test_bits_are_torchs_over_shared_memory(ranks: Any, case: str) -> None:
    ranks(2).run(play_over, "shared_memory", train, torch.complex64, CASES[case])


@on_ranks(2)
def test_a_hook_is_shown_complex_gradients(rank: int) -> None:
    """The parameters' own, in the buffer. Torch shows it real tensors of the complex shapes, from the first half.

    Those of parameters that are not row-major are shown row-major nevertheless, with another order of elements.
    """
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(Waves(torch.complex64))
    shown = []

    def hook(_state: object, bucket):  # type: ignore[no-untyped-def]
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            own = not param.is_contiguous() or torch.equal(grad, param.grad)
            before = bucket.buffer().clone()
            grad.zero_()
            shown.append(own and not torch.equal(before, bucket.buffer()))
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, hook)
    ddp(random(3, 6, rank=rank)).square().sum().backward()
    assert shown == [True] * 8
