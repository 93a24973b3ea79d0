"""Autocast and loss scaling around the wrapper, which has no code for either: the same bits as with torch's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.features.beside import Trail, Wrap, play, random, snapshot

WIDTH = 6


class Net(nn.Module):
    """Under autocast the linear layers compute in low precision; the norm does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x).float()).relu())


def train(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    """With `overflow_at`, rank 1 has infinite gradients in that step: no rank may take it."""
    torch.manual_seed(0)
    ddp = wrap(Net(), **case.get("options", {}))
    if "hook" in case:
        ddp.register_comm_hook(None, case["hook"])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=case.get("scales", True))
    num_batches = case.get("accumulate", 1)
    trail = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
        for batch in range(num_batches):
            with nullcontext() if batch == num_batches - 1 else ddp.no_sync():
                with torch.autocast("cpu", dtype=case["dtype"]):
                    loss = ddp(random(5, WIDTH, rank=rank, step=10 * step + batch)).square().mean()
                if step == case.get("overflow_at") and rank == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        before = ddp.module.last.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        has_stepped = not torch.equal(before, ddp.module.last.weight)
        assert has_stepped == (step != case.get("overflow_at"))
        trail.append(snapshot(ddp, loss=loss, norm=norm, scale=torch.tensor(scaler.get_scale())))
    return trail


def _play(rank: int, case: dict[str, Any]) -> list[Any]:
    return [taken["scale"] for taken in play(rank, train, case)]


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": torch.bfloat16, "scales": False},
        {"dtype": torch.bfloat16, "overflow_at": 2},
        {"dtype": torch.float16, "overflow_at": 0, "accumulate": 2, "set_to_none": False},
        {"dtype": torch.bfloat16, "options": {"static_graph": True, "bucket_cap_mb": 0.0001}},
        {"dtype": torch.float16, "options": {"gradient_as_bucket_view": True}, "overflow_at": 3},
        {"dtype": torch.bfloat16, "hook": default_hooks.fp16_compress_hook},
    ],
    ids=" ".join,
)
def test_autocast_and_loss_scaling(ranks: Any, case: dict[str, Any]) -> None:
    ranks(2).run(_play, case)


def test_the_scale_follows_an_overflow_on_one_rank(ranks: Any) -> None:
    scales, others = ranks(2).run(_play, {"dtype": torch.bfloat16, "overflow_at": 2})
    assert scales == others == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
