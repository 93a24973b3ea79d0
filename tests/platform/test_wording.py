"""Ranks, sizes, counts and names as messages write them."""

from __future__ import annotations

import pytest

from minddp.platform import wording


@pytest.mark.parametrize(
    ("numbers", "written"),
    [
        ([2], "rank 2"),
        ([3, 0], "ranks 0 and 3"),
        ([0, 1, 2], "ranks 0-2"),
        ([7, 0, 1, 2, 5], "ranks 0-2, 5 and 7"),
        ([0, 1], "ranks 0 and 1"),
    ],
)
def test_ranks(numbers: list[int], written: str) -> None:
    assert wording.ranks(numbers) == written


def test_ranks_as_the_subject_of_a_sentence() -> None:
    assert wording.subject([2], "waits", "wait") == "Rank 2 waits"
    assert wording.subject([3, 0], "waits", "wait") == "Ranks 0 and 3 wait"


@pytest.mark.parametrize(
    ("nbytes", "written"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (65536, "64 KiB"), (1.13 * 2**20, "1.13 MiB"), (212 * 2**30, "212 GiB")],
)
def test_sizes(nbytes: float, written: str) -> None:
    assert wording.size(nbytes) == written


def test_counts() -> None:
    assert [wording.count(1, "rank"), wording.count(2, "rank"), wording.count(1.5, "core")] == [
        "1 rank",
        "2 ranks",
        "1.5 cores",
    ]


def test_many_names_of_one_layer_are_written_as_the_layer() -> None:
    assert wording.names(["a.weight", "b"]) == "`a.weight`, `b`"
    assert wording.names(["a.w", "a.b", "b.w", "b.b", "c"], most=3) == "`a.*`, `b.*`, `c`"
    assert wording.names([f"p{i}" for i in range(9)], most=2) == "`p0`, `p1` and 7 more"
