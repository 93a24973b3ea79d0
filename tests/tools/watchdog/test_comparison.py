"""Notes of several ranks that meet on rank 0. In one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from minddp.tools.watchdog import comparison
from minddp.tools.watchdog.check import Check, Finding, Notes
from minddp.tools.watchdog.comparison import NotesComparison
from tests.fakes import FakeTransport


class Scripted(Check):
    """Has these notes, and remembers which numbers were compared, and what."""

    def __init__(self, notes: Notes):
        self.notes = notes
        self.seen: list[tuple[int, Sequence[Any]]] = []

    def take_notes(self, is_last: bool = False) -> Notes:
        taken, self.notes = self.notes, []
        return taken

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        self.seen.append((number, notes))
        yield Finding("scripted", "the same", number, (1,), "a finding")


def opened(*notes_of_ranks: Notes) -> tuple[list[NotesComparison], dist.Store]:
    """An exchange of each rank, and their store."""
    store = dist.HashStore()
    checks = [{"scripted": Scripted(notes)} for notes in notes_of_ranks]
    transports = [FakeTransport(len(checks), rank, store=store) for rank in range(len(checks))]
    exchanges = [NotesComparison(*pair) for pair in zip(transports, checks, strict=True)]
    for one in exchanges:
        one.open("test")
    return exchanges, store


def exchanged(*notes_of_ranks: Notes) -> tuple[Any, list[list[Finding]]]:
    """Rank 0's check, and what each rank has found, after all have sent their notes."""
    exchanges, _ = opened(*notes_of_ranks)
    for one in 2 * exchanges[::-1]:
        one.turn()
    return exchanges[0]._checks["scripted"], [one.found for one in exchanges]


def test_what_all_ranks_have_noted_is_compared_by_number_and_rank() -> None:
    check, found = exchanged([(0, "a"), (1, "b")], [(0, "c"), (1, "d")])
    assert check.seen == [(0, ["a", "c"]), (1, ["b", "d"])]
    assert [(one.step, one.ranks, one.text) for one in found[0]] == [(0, (1,), "a finding")], "reported once"


def test_what_one_rank_has_not_noted_is_left_out() -> None:
    noted = [range(11, 16), range(13, 22), (11, 12, 13, 15)]
    check, _ = exchanged(*([(number, number) for number in numbers] for numbers in noted))
    assert check.seen == [(13, [13] * 3), (15, [15] * 3)]


def test_what_only_one_rank_notes_takes_no_more_and_more_memory() -> None:
    most = comparison.MOST_KEPT
    check, _ = exchanged([(number, None) for number in range(most + 5)], [(4, None), (5, None), (6, None)])
    assert [number for number, _ in check.seen] == [5, 6]


def test_notes_that_are_not_compared_any_more_do_not_stay_in_the_store() -> None:
    """Rank 0 leaves first, and has nothing to compare."""
    exchanges, store = opened([], [(0, "a")])
    before = store.num_keys()
    for one in exchanges:
        one.turn(is_last=True)
    assert store.num_keys() == before


def test_rank_0_waits_for_no_last_notes_that_another_rank_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LAST_S", 3600.0)
    exchanges, _ = opened([(0, "a")], [])
    for one in reversed(exchanges):
        one.turn(is_last=True)
