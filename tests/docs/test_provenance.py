"""Correct schemes have no violation, each classic bug has its own, real rungs count each source once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from docs.learning import provenance
from docs.learning.provenance import (
    BUGS,
    CORRECT,
    Replica,
    all_reduce_sum,
    run_scheme,
    violations,
)
from reference.ladder import rungs

PARAMETERS = ("w1", "b1", "w2", "b2")


@dataclass(frozen=True)
class DigitTracer:
    """Numbers that count sources: each (rank, batch) owns one base-16 digit of an integer in a float64.

    With `loss = tracer.mark(rank, batch) * param.sum()` every element of `param.grad` is that mark. What
    comes back from the ranks, times `ranks`, is an integer whose digits count how often each source is in it.
    """

    ranks: int
    batches: int

    def mark(self, rank: int, batch: int) -> float:
        return 16.0 ** (rank * self.batches + batch)

    def count(self, averaged: float) -> Counter[tuple[int, int]]:
        """`{(rank, batch): how often}` in one element of an averaged gradient."""
        number = round(averaged * self.ranks)
        sources = [(rank, batch) for rank in range(self.ranks) for batch in range(self.batches)]
        return Counter({source: number >> (4 * place) & 15 for place, source in enumerate(sources)})

    def once_each(self) -> Counter[tuple[int, int]]:
        """What a correct average counts."""
        return Counter((rank, batch) for rank in range(self.ranks) for batch in range(self.batches))


def by_name(scheme) -> str:
    return scheme.__name__


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("scheme", CORRECT, ids=by_name)
def test_correct_schemes_are_proven(scheme, ranks, batches):
    assert run_scheme(scheme, ranks, batches, PARAMETERS) == []


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        (provenance.sum_every_micro_batch, "rank 0, `w1`: rank 0's batch 0 of `w1` has weight 1, not 1/3"),
        (provenance.reduce_twice, "rank 2, `w1`: rank 1's batch 1 of `w1` has weight 1, not 1/3"),
        (provenance.forget_a_rank, "rank 0, `b1`: rank 2's batch 0 of `b1` has weight 0, not 1/3"),
        (provenance.forget_a_bucket, "rank 1, `b2`: rank 0's batch 0 of `b2` has weight 0, not 1/3"),
        (provenance.forget_the_division, "rank 1, `w2`: rank 0's batch 0 of `w2` has weight 1, not 1/3"),
        (
            provenance.average_the_last_backward_only,
            "rank 0, `w1`: rank 1's batch 0 of `w1` has weight 0, not 1/3",
        ),
        (provenance.launch_in_readiness_order, "rank 0, `w1`: rank 2's batch 0 of `b2` has weight 1/3, not 0"),
    ],
)
def test_each_bug_has_its_violation(scheme, fault):
    assert fault in run_scheme(scheme, 3, 2, PARAMETERS)


def test_a_gradient_without_any_reduction_is_no_average():
    replicas = [Replica(0, ["w"]), Replica(1, ["w"])]
    for replica in replicas:
        replica.backward(0)
    assert violations(replicas, 1) == [
        "rank 0, `w`: rank 0's batch 0 of `w` has weight 1, not 1/2",
        "rank 0, `w`: rank 1's batch 0 of `w` has weight 0, not 1/2",
        "rank 1, `w`: rank 0's batch 0 of `w` has weight 0, not 1/2",
        "rank 1, `w`: rank 1's batch 0 of `w` has weight 1, not 1/2",
    ]


@pytest.mark.parametrize("launches", [[[("w",)], []], [[("w", "b")], [("w",)]]])
def test_messages_that_do_not_pair_are_an_error(launches):
    with pytest.raises(ValueError):
        all_reduce_sum([Replica(0, ["w", "b"]), Replica(1, ["w", "b"])], launches)


def test_the_command_gives_every_scheme_its_verdict(capsys):
    provenance.main()
    out = capsys.readouterr().out
    assert out.count("proven") == len(CORRECT)
    assert out.count(" faults ") >= len(BUGS)


# --- the same in real gradients, on real rungs ---


class MarkedSum(nn.Module):
    """Every element of every gradient is the mark the forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, mark: float) -> Tensor:
        return mark * (self.w.sum() + self.b.sum())


def counts_on(rank: int, rung: str, batches: int, forget_no_sync: bool) -> list[Counter[tuple[int, int]]]:
    """What each element of each gradient counts after `batches`, all but the last under no_sync or none."""
    tracer = DigitTracer(dist.get_world_size(), batches)
    ddp = rungs(cap_bytes=0)[rung](MarkedSum())
    for batch in range(batches):
        if batch < batches - 1 and not forget_no_sync:
            with ddp.no_sync():
                ddp(tracer.mark(rank, batch)).backward()
        else:
            ddp(tracer.mark(rank, batch)).backward()
            ddp.synchronize()
    elements = torch.cat([param.grad.reshape(-1) for param in ddp.trainable.values()])
    return [tracer.count(element) for element in elements.tolist()]


@pytest.mark.parametrize("forget_no_sync", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("rung", sorted(rungs(0)))
def test_real_rungs_count_every_rank_and_micro_batch_once(ranks, rung, world_size, forget_no_sync):
    """Also without no_sync: an average of averages is the average."""
    once_each = DigitTracer(world_size, 3).once_each()
    assert len(once_each) == 3 * world_size
    for counts in ranks(world_size).run(counts_on, rung, 3, forget_no_sync):
        assert counts == [once_each] * 8
