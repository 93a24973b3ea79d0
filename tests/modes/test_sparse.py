"""Sparse gradients, of embeddings with sparse=True: the same bits as torch's, and what torch cannot."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

import minddp
from tests.features.beside import Trail, Wrap, play, play_over, random, snapshot
from tests.ranks import on_ranks

ROWS, WIDTH = 12, 5


class Words(nn.Module):
    """Two sparse embeddings between dense layers; `tied` uses the first one's weight a second time."""

    def __init__(self, kind: str = "embedding"):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.after = nn.Linear(WIDTH, 3)
        self.again = nn.Embedding(ROWS, WIDTH, sparse=True)
        if kind == "tied":
            self.again.weight = self.words.weight

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.words(tokens) + 2 * self.again(tokens.flip(0)) + self.bags(tokens.view(-1, 1))
        return self.after(self.before(x) + embedded)


def tokens(rank: int, step: int) -> torch.Tensor:
    """With repetitions, so that gradients are not coalesced."""
    return torch.randint(ROWS, (7,), generator=torch.Generator().manual_seed(99 + 10 * step + rank))


def train(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    model = Words(case.get("kind", "embedding"))
    ddp = wrap(model, **case.get("options", {}))
    if case.get("hook"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    sparse = [model.words.weight, model.bags.weight, *([] if case.get("kind") else [model.again.weight])]
    dense = [*model.before.parameters(), *model.after.parameters()]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(dense, lr=0.1, momentum=0.9)]
    optimizers.append(
        torch.optim.SparseAdam(sparse, lr=0.1) if case.get("adam") else torch.optim.SGD(sparse, lr=0.1)
    )
    trail = []
    for step in range(4):
        for batch in range(case.get("accumulate", 1)):
            last = batch == case.get("accumulate", 1) - 1
            with nullcontext() if last else ddp.no_sync():
                ddp(
                    random(7, WIDTH, rank=rank, step=step), tokens(rank, 2 * step + batch)
                ).square().sum().backward()
        trail.append(snapshot(ddp))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        trail.append(snapshot(ddp))
    return trail


CASES = {
    "plain": {},
    "tied": {"kind": "tied"},
    "SparseAdam": {"adam": True},
    "accumulation": {"accumulate": 3},
    "views": {"options": {"gradient_as_bucket_view": True}},
    "batched": {"options": {"batched_grad_copy": True}},
    "static graph": {"kind": "tied", "options": {"static_graph": True}},
    "find unused": {"options": {"find_unused_parameters": True}},
    "small buckets": {"options": {"bucket_cap_mb": 0.00001}},
    "hook": {"hook": True},
}


ARITHMETIC = ("plain", "views", "batched")  # the cases in which the number of ranks may matter


@pytest.mark.parametrize(
    ("case", "world_size"), [*((case, 2) for case in CASES), *((case, 3) for case in ARITHMETIC)]
)
def test_bits_are_torchs(ranks: Any, case: str, world_size: int) -> None:
    for trail in ranks(world_size).run(play, train, CASES[case]):
        assert "module.words.weight.grad values" in trail[0]


@pytest.mark.parametrize("case", ["plain", "accumulation", "find unused"])
def test_bits_are_torchs_over_shared_memory(ranks: Any, case: str) -> None:
    ranks(2).run(play_over, "shared_memory", train, CASES[case])


# ------------------------------------------------------------------ what torch does not do


class Added(nn.Module):
    """Autograd gives both embeddings the gradient of the sum, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.other = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.one(chosen) + self.other(chosen.flip(0))


@on_ranks(2)
def test_embeddings_that_share_the_values_of_their_gradients_are_scaled_once(rank: int) -> None:
    """Torch scales both in place, and so one of them twice."""
    ddp = minddp.DistributedDataParallel(Added())
    alone = copy.deepcopy(ddp.module)
    for model in (ddp, alone):
        model(tokens(rank, 0)).square().sum().backward()
    for name, param in alone.named_parameters():
        local = param.grad.to_dense()
        dist.all_reduce(local)
        torch.testing.assert_close(ddp.module.get_parameter(name).grad.to_dense(), local / dist.get_world_size())


class Optional(nn.Module):
    """An embedding that may be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.body = nn.Linear(WIDTH, 1)

    def forward(self, chosen: torch.Tensor | None) -> torch.Tensor:
        x = torch.ones(1, WIDTH)
        return self.body(x if chosen is None else x + self.words(chosen).sum(0))


def _left_out(rank: int, by: list[int], keeps: bool) -> list[torch.Tensor | None]:
    """The embedding's gradient after each of three steps in which the ranks in `by` leave it out."""
    torch.manual_seed(0)
    model = Optional()
    ddp = minddp.DistributedDataParallel(model, find_unused_parameters=True)
    seen = []
    for _ in range(3):
        ddp(None if rank in by else torch.tensor([1, 1, 2 + rank])).sum().backward()
        grad = model.words.weight.grad
        seen.append(None if grad is None else grad.to_dense())
        if not keeps:
            ddp.zero_grad()
    return seen


@pytest.mark.parametrize("keeps", [False, True])
def test_an_embedding_unused_on_some_ranks_gets_the_average_on_all(ranks: Any, keeps: bool) -> None:
    """Torch raises "Expected sparse gradient to be defined" on the rank that leaves it out; the others hang."""
    results = ranks(3).run(_left_out, [1], keeps)
    torch.manual_seed(0)
    gradient = Optional().body.weight.detach()  # of the embedding of one token
    for step in range(3):
        expected = torch.zeros(ROWS, WIDTH)
        for row, times in {1: 4, 2: 1, 4: 1}.items():
            expected[row] = gradient * times * ((step + 1) if keeps else 1) / 3
        for seen in results:
            torch.testing.assert_close(seen[step], expected)


def test_an_embedding_unused_on_all_ranks_keeps_its_missing_gradient(ranks: Any) -> None:
    assert ranks(2).run(_left_out, [0, 1], False) == [[None] * 3] * 2


class Confused(nn.Module):
    """A weight whose gradient is not what its module lets expect, in the steps that are `odd`."""

    def __init__(self, kind: str):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=kind == "dense")

    def forward(self, odd: bool) -> torch.Tensor:
        weight = self.words.weight
        if odd == self.words.sparse:
            return weight.square().sum()
        return functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum()


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "odd_step", "words"),
    [
        ("dense", 0, "Expected variable to have sparse gradient"),
        ("dense", 3, "Expected variable to have sparse gradient"),
        ("sparse", 0, "Expected a dense gradient"),
    ],
)
def test_a_gradient_of_the_wrong_kind_names_its_parameter(rank: int, kind: str, odd_step: int, words: str) -> None:
    """And the next step works."""
    model = Confused(kind)
    ddp = minddp.DistributedDataParallel(model)
    for step in range(odd_step + 2):
        ddp.zero_grad()
        error = pytest.raises(RuntimeError, match=rf"(?s){words}.*`words\.weight`")
        with error if step == odd_step else nullcontext():
            ddp(odd=step == odd_step).backward()
    assert len(model.words.weight.grad.to_dense()) == ROWS
