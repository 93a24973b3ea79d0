"""What replicas must agree on, without ranks: descriptions, and the sentences in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from minddp.replicas.agreement import Replica, _fingerprint_of, verify_replicas_agree
from tests.fakes import FakeTransport, options
from tests.logs import must_log
from tests.transport.threads import ThreadGroup, on_threads

CPU = torch.device("cpu")


def side(model: nn.Module | None = None, ignored: Sequence[str] = (), **changed: object) -> Replica:
    """Of a module with the given options; what is ignored is not reduced."""
    model = nn.Linear(3, 2) if model is None else model
    reduced = [(name, p) for name, p in model.named_parameters() if p.requires_grad and name not in ignored]
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return Replica.of(reduced, [*frozen, *model.named_buffers()], ignored, options(**changed))


def on_all_ranks(sides: Sequence[Replica]) -> list[Any]:
    """The result of the verification, or its error, on each rank."""
    group = ThreadGroup(len(sides))

    def on_rank(rank: int) -> Any:
        try:
            return verify_replicas_agree(group.of(rank), sides[rank], CPU)
        except RuntimeError as error:
            return error

    return on_threads(len(sides), on_rank)


def outcomes(*sides: Replica) -> list[str]:
    """The message on each rank."""
    results = on_all_ranks(sides)
    return [str(result) if isinstance(result, RuntimeError) else "agreed" for result in results]


def test_agreement_costs_one_small_gather() -> None:
    transport = FakeTransport()
    verify_replicas_agree(transport, side(nn.Linear(1000, 1000)), CPU)
    assert transport.calls == [("all_gather", 2)]


class Named(nn.Module):
    """Parameters and buffers by name and size."""

    def __init__(self, frozen: Sequence[str] = (), buffers: Sequence[str] = (), **sizes: int):
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size), requires_grad=name not in frozen))
        for name in buffers:
            self.register_buffer(name, torch.zeros(2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (side(Named(a=2)), side(Named(b=2))),
        (side(gradient_as_bucket_view=True), side(batched_grad_copy=True)),
        (side(static_graph=True, find_unused_parameters=True), side(static_graph=True)),
        (side(Named(a=2, expert0=3), ["expert0"]), side(Named(a=2, expert1=5), ["expert1"])),
        (side(), side(nn.Linear(3, 2), ["no such parameter"])),
    ],
    ids=["names", "views and batches", "unused in a static graph", "experts of one's own", "stale ignore-list"],
)
def test_what_may_differ(one: Replica, other: Replica) -> None:
    assert outcomes(one, other) == ["agreed", "agreed"]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (side(find_unused_parameters=True), ["`find_unused_parameters` is False on rank 0, but True on rank 2"]),
        (side(static_graph=True), ["`static_graph` is False on rank 0, but True on rank 2"]),
        (side(bucket_cap_mb_list=[1, 2]), ["first capacities", "(1048576, 2097152) on rank 2"]),
        (side(skip_all_reduce_unused_params=True, static_graph=True), ["`skip_all_reduce", "`static_graph`"]),
    ],
)
def test_what_must_not_differ_is_named_on_every_rank(odd: Replica, words: list[str]) -> None:
    for text in outcomes(side(), side(), odd):
        for word in words:
            assert word in text


class Odd(nn.Module):
    def __init__(self, change: str = ""):
        super().__init__()
        self.same = nn.Linear(2, 2)
        self.odd = nn.Conv2d(2, 2, 5 if change == "shape" else 3)
        if change == "count":
            self.extra = nn.Linear(2, 2, bias=False)
        elif change == "dtype":
            self.odd = self.odd.double()
        elif change == "strides":
            self.odd = self.odd.to(memory_format=torch.channels_last)
        elif change == "frozen":
            self.odd.weight.requires_grad_(False)


@pytest.mark.parametrize("odd_rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "aspect", "usual", "odd"),
    [
        ("shape", "sizes", [2, 2, 3, 3], [2, 2, 5, 5]),
        ("strides", "strides", [18, 9, 3, 1], [18, 1, 6, 2]),
        ("dtype", "dtype", "torch.float32", "torch.float64"),
    ],
)
def test_a_parameter_that_differs_is_named_on_every_rank(
    change: str, aspect: str, usual: object, odd: object, odd_rank: int
) -> None:
    blamed = odd_rank or 1  # rank 0 is the reference, so another rank is the one that differs
    of_rank_0, of_blamed = (odd, usual) if odd_rank == 0 else (usual, odd)
    for rank, text in enumerate(outcomes(*(side(Odd(change if rank == odd_rank else "")) for rank in range(3)))):
        where = "this process" if rank == blamed else f"process {blamed}"
        assert text.startswith(f"[{rank}]: params[2] in {where} with sizes ")
        assert f"appears not to match {aspect} of the same param in process 0" in text
        assert f"`odd.weight` has {aspect} {of_rank_0} on rank 0; it has {of_blamed} on rank {blamed}" in text


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize(("change", "count", "name"), [("count", 5, "extra.weight"), ("frozen", 3, "odd.weight")])
def test_another_number_of_parameters_is_named_on_every_rank(
    change: str, count: int, name: str, odd_rank: int
) -> None:
    for rank, text in enumerate(outcomes(*(side(Odd(change if rank == odd_rank else "")) for rank in range(3)))):
        here, there = (count, 4) if rank == odd_rank else (4, count)
        assert text.startswith(
            f"DDP expects same model across all ranks, but Rank {rank} has {here} params, while rank "
        )
        assert f"has inconsistent {there} params" in text
        assert f"do not share: {name}" in text


def test_what_one_ignores_the_other_must_not_reduce() -> None:
    """Although it has the size of the other rank's, with which it would be summed."""
    one, other = side(Named(a=2, b=2), ["a"]), side(Named(a=2, b=2), ["b"])
    for text in outcomes(one, other):
        assert "rank 0 reduces `b`, which rank 1 ignores" in text
        assert "_ddp_params_and_buffers_to_ignore" in text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (side(Named(a=2, f=3, frozen=["f"])), ["`x` has sizes [2] on rank 0; `f` has [3] on rank 1"]),
        (
            side(Named(a=2, buffers=["x", "y"])),
            ["2 buffers and frozen params", "do not share: y", "Ignore those of one rank"],
        ),
    ],
)
def test_what_is_broadcast_must_fit(other: Replica, words: list[str]) -> None:
    for text in outcomes(side(Named(a=2, buffers=["x"])), other):
        for word in words:
            assert word in text


def test_capacities_are_those_of_rank_0() -> None:
    sides = [side(bucket_cap_mb=1), side(bucket_cap_mb=7)]
    with must_log("rank 1 are not those on rank 0"):
        agreed = on_all_ranks(sides)
    assert [replica.caps for replica in agreed] == [options(bucket_cap_mb=1).caps] * 2


def test_a_fingerprint_covers_every_field() -> None:
    ours = side()
    changes = {"reduced": [], "others": [["x"]], "ignored": ["x"], "options": {}, "caps": [1]}
    prints = {
        _fingerprint_of(each)
        for each in (ours, *(replace(ours, **{name: value}) for name, value in changes.items()))
    }
    assert len(prints) == len(changes) + 1
