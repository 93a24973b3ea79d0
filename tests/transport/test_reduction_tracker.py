from __future__ import annotations

import pytest
import torch

from minddp.transport.shared_memory.messages import AddendReady, Ended, Leaving
from minddp.transport.shared_memory.reduction_tracker import ReductionTracker


def addend(reduction: int, numel: int = 10, dtype: torch.dtype = torch.float32) -> AddendReady:
    return AddendReady(reduction, segment=0, offset_bytes=0, numel=numel, dtype=dtype)


def test_all_reduces_are_reduced_in_order() -> None:
    tracker = ReductionTracker(0, range(2))
    tracker.add_addend(1, addend(0))
    tracker.add_addend(1, addend(1))
    tracker.add_addend(0, addend(0))
    assert tracker.next_to_reduce() == [addend(0)] * 2
    tracker.mark_reduced()
    assert tracker.next_to_reduce() is None
    tracker.add_addend(0, addend(1))
    assert tracker.next_to_reduce() == [addend(1)] * 2


def test_done_is_what_every_rank_has_done() -> None:
    tracker = ReductionTracker(0, range(2))
    tracker.add_addend(0, addend(0))
    tracker.add_addend(1, addend(0))
    tracker.num_done[1] = 1
    assert not tracker.is_done(0)
    tracker.mark_reduced()
    assert tracker.is_done(0)
    assert not tracker.is_done(1)


def test_different_dtypes_are_an_error() -> None:
    tracker = ReductionTracker(0, range(2))
    tracker.add_addend(0, addend(0))
    tracker.add_addend(1, addend(0, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"torch\.float32, but rank 1 has 10 elements of torch\.float64"):
        tracker.next_to_reduce()


def test_a_rank_that_has_ended_matters_only_to_what_it_has_not_done() -> None:
    tracker = ReductionTracker(0, range(4))
    tracker.num_done[1] = 1
    tracker.ended = {1: Leaving(""), 3: Ended()}
    assert tracker.reason_for_failure(0).startswith("Rank 3 was killed before all-reduce 0 was done")
    assert tracker.reason_for_failure(1).startswith("Rank 1 has left before all-reduce 1 was done")
    tracker.num_done[3] = 1
    assert tracker.reason_for_failure(0) is None


def test_a_rank_that_fails_passes_its_reason_on() -> None:
    tracker = ReductionTracker(0, range(4))
    tracker.ended = {2: Leaving("Rank 3 sleeps.")}
    assert tracker.reason_for_failure(0) == "Rank 3 sleeps."


def test_the_timeout_error_names_ranks_that_have_not_begun() -> None:
    tracker = ReductionTracker(0, range(4))
    tracker.add_addend(0, addend(0))
    tracker.add_addend(2, addend(0))
    assert "within 30 s: Ranks 1 and 3 have not begun it." in tracker.timeout_error(0, 30.0)


def test_the_timeout_error_names_ranks_that_have_not_finished() -> None:
    tracker = ReductionTracker(0, range(3))
    for rank in range(3):
        tracker.add_addend(rank, addend(0))
    tracker.mark_reduced()
    tracker.num_done[1] = 1
    assert "within 0.5 s: Rank 2 has begun it and not finished" in tracker.timeout_error(0, 0.5)
