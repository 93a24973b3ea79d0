from __future__ import annotations

import pytest

from minddp.transport.shared_memory.ledger import Ledger
from minddp.transport.shared_memory.messages import DTYPES, Addend


def addend(reduction: int, numel: int = 10, dtype: int = 0) -> Addend:
    return Addend(reduction, segment=0, offset_bytes=0, numel=numel, dtype=dtype)


def lost(ledger: Ledger, reduction: int) -> str | None:
    return ledger.lost(f"all-reduce {reduction}", ledger.missing(reduction))


def test_adding_up_waits_for_all_addends() -> None:
    ledger = Ledger(rank=0, world_size=3)
    for rank in (2, 0):
        ledger.note_addend(rank, addend(0, numel=10))
    assert ledger.next_to_add_up() is None
    ledger.note_addend(1, addend(0))
    assert ledger.next_to_add_up() == [addend(0)] * 3


def test_all_reduces_are_added_up_in_order() -> None:
    ledger = Ledger(rank=0, world_size=2)
    ledger.note_addend(1, addend(0))
    ledger.note_addend(1, addend(1))
    ledger.note_addend(0, addend(0))
    assert ledger.next_to_add_up() == [addend(0)] * 2
    ledger.note_added_up()
    assert ledger.next_to_add_up() is None
    ledger.note_addend(0, addend(1))
    assert ledger.next_to_add_up() == [addend(1)] * 2


def test_done_is_what_every_rank_has_done() -> None:
    ledger = Ledger(rank=0, world_size=2)
    ledger.note_addend(0, addend(0))
    ledger.note_addend(1, addend(0))
    ledger.num_done[1] = 1
    assert not ledger.is_done(0)
    ledger.note_added_up()
    assert ledger.is_done(0)
    assert not ledger.is_done(1)


def test_different_sizes_are_an_error_that_names_the_rank() -> None:
    ledger = Ledger(rank=0, world_size=2)
    ledger.note_addend(0, addend(0, numel=1000))
    ledger.note_addend(1, addend(0, numel=1001))
    with pytest.raises(RuntimeError, match=r"rank 0 has 1,000 elements .*, but rank 1 has 1,001 elements"):
        ledger.next_to_add_up()


def test_different_dtypes_are_an_error() -> None:
    ledger = Ledger(rank=0, world_size=2)
    ledger.note_addend(0, addend(0, dtype=0))
    ledger.note_addend(1, addend(0, dtype=1))
    with pytest.raises(RuntimeError, match=f"{DTYPES[0]}, but rank 1 has 10 elements of {DTYPES[1]}"):
        ledger.next_to_add_up()


def test_who_has_left_matters_only_to_what_it_has_left_undone() -> None:
    ledger = Ledger(rank=0, world_size=4)
    ledger.num_done[1] = 1
    ledger.left = {1: "", 3: ""}
    assert lost(ledger, 0).startswith("Rank 3 has left before all-reduce 0 was done")
    assert lost(ledger, 1).startswith("Ranks 1, 3 have left before all-reduce 1 was done")
    ledger.num_done[3] = 1
    assert lost(ledger, 0) is None


def test_who_gives_up_says_why_and_everybody_says_the_same() -> None:
    ledger = Ledger(rank=0, world_size=4)
    ledger.left = {1: "", 2: "Rank 3 sleeps."}
    assert lost(ledger, 0) == "Rank 3 sleeps."


def test_who_falls_silent_without_a_farewell_was_killed() -> None:
    ledger = Ledger(rank=0, world_size=3)
    ledger.left[1] = ""
    ledger.note_silence(1)
    assert lost(ledger, 0).startswith("Rank 1 has left")
    ledger.note_silence(2)
    assert lost(ledger, 0).startswith("Rank 2 was killed before all-reduce 0 was done")


def test_overdue_names_who_has_not_begun() -> None:
    ledger = Ledger(rank=0, world_size=4)
    ledger.note_addend(0, addend(0))
    ledger.note_addend(2, addend(0))
    assert "within 30 s: Ranks 1, 3 have not begun it." in ledger.overdue(0, 30.0)


def test_overdue_names_who_has_not_finished() -> None:
    ledger = Ledger(rank=0, world_size=3)
    for rank in range(3):
        ledger.note_addend(rank, addend(0))
    ledger.num_done[1] = 1
    assert "within 0.5 s: Rank 2 has begun it and not finished." in ledger.overdue(0, 0.5)


def test_once_we_have_done_our_part_all_others_have_begun() -> None:
    ledger = Ledger(rank=0, world_size=3)
    for rank in range(3):
        ledger.note_addend(rank, addend(0))
    ledger.note_added_up()
    ledger.num_done[1] = 1
    assert "within 0.5 s: Rank 2 has begun it and not finished." in ledger.overdue(0, 0.5)
