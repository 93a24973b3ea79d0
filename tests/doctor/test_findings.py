"""The turns of phrase that findings share."""

from __future__ import annotations

import pytest

from minddp.doctor.findings import Finding, Verdict, by_value, count, differing, is_broken, name_ranks, size


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([2, 0, 1, 7], "ranks 0-2, 7"), ([0, 2, 4], "ranks 0, 2, 4")],
)
def test_ranks(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name


def test_most_come_first() -> None:
    values = {0: "b", 1: "a", 2: "a", 3: "c"}
    assert list(by_value(values).items()) == [("a", [1, 2]), ("b", [0]), ("c", [3])]
    assert differing(values) == "a on ranks 1, 2, b on rank 0, c on rank 3"


def test_units() -> None:
    assert [size(n) for n in (0, 4096, 2**20, 1.5 * 2**30)] == ["0 bytes", "4 KiB", "1 MiB", "1.5 GiB"]
    assert [count(1, "core"), count(1.5, "core"), count(0, "core")] == ["1 core", "1.5 cores", "0 cores"]


def test_only_the_worst_is_broken() -> None:
    fine, note, broken = (Finding("check", verdict, "fact") for verdict in Verdict)
    assert not is_broken([fine, note])
    assert is_broken([fine, broken])
