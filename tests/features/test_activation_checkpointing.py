"""Activation checkpointing, both kinds: the same bits as torch's, and the same use of `static_graph`.

The reentrant kind runs a backward inside the backward, so hooks fire in a nested one, and as often as a parameter
is used in different checkpoints.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot

WIDTH = 6


class Net(nn.Module):
    """Three blocks, recomputed in backward as `how` says; `tied` uses the first block at both ends.

    `bare` has no parameters outside the blocks, so that all hooks fire in nested backwards.
    """

    def __init__(self, how: dict[str, Any]):
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.head = nn.Identity() if how.get("bare") else nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reentrant = self.how["reentrant"]
        blocks = [*self.blocks, self.blocks[0]] if self.how.get("tied") else list(self.blocks)
        if self.how.get("sequential"):
            return self.head(checkpoint_sequential(blocks, 2, x, use_reentrant=reentrant))
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)


def train(wrap: Wrap, rank: int, how: dict[str, Any], options: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(Net(how), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    trail = []
    for step in range(4):
        optimizer.zero_grad()
        num_batches = 2 if how.get("accumulate") and step > 0 else 1  # torch cannot record a graph under no_sync
        for batch in range(num_batches):
            # Reentrant checkpoints only recompute for inputs that require grad.
            x = random(4, WIDTH, rank=rank, step=2 * step + batch).requires_grad_()
            with nullcontext() if batch == num_batches - 1 else ddp.no_sync():
                ddp(x).square().sum().backward()
        trail.append(snapshot(ddp))
        optimizer.step()
    return trail


def _play(rank: int, how: dict[str, Any], options: dict[str, Any]) -> None:
    play(rank, train, how, options)


STATIC = {"static_graph": True}


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({"reentrant": False, "tied": True}, {"find_unused_parameters": True}),
        ({"reentrant": False, "tied": True}, STATIC | {"gradient_as_bucket_view": True}),
        ({"reentrant": True}, {}),
        ({"reentrant": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}),
        ({"reentrant": True, "tied": True, "accumulate": True}, STATIC | {"bucket_cap_mb": 0.0001}),
        ({"reentrant": True, "bare": True}, {}),
        ({"reentrant": True, "bare": True}, STATIC),
        ({"reentrant": True, "sequential": True}, STATIC),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_bits_are_torchs(ranks: Any, how: dict[str, Any], options: dict[str, Any]) -> None:
    ranks(2).run(_play, how, options)


def _errors(rank: int) -> list[str]:
    said = []
    for cls in (TorchDDP, minddp.DistributedDataParallel):
        with pytest.raises(RuntimeError) as caught:
            train(cls, rank, {"reentrant": True, "tied": True}, {"find_unused_parameters": True})
        said.append(str(caught.value))
    return said


def test_parameters_in_several_reentrant_checkpoints_need_a_static_graph(ranks: Any) -> None:
    theirs, ours = ranks(2).run(_errors)[0]
    for said in (theirs, ours):
        assert "mark a variable ready only once" in said
    assert "blocks.0.0." in ours
    assert "static_graph=True" in ours
