"""What is said of ranks that do not meet, given who has come. Real jobs: tests/tools/launch/test_meeting.py."""

from __future__ import annotations

from typing import Any

import pytest

from minddp.tools.watchdog.meeting import REMEDY, Arrival, diagnose

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "GROUP_RANK": "0"}


def come(*claims: int, size: int = 3, changed: str = "") -> dict[int, Arrival]:
    return {rank: Arrival(claim, size, "localhost", 1, changed) for rank, claim in enumerate(claims)}


def test_a_missing_rank_is_named_with_its_place() -> None:
    where = "its process, on node 1, has ended or does something else first"
    assert diagnose(come(0, 1), 3, 2) == f"Rank 2 of 3 has not come; {where}."
    assert diagnose(come(0, 1), 2, 2) == "Rank 2 of 3 has not come; the launcher has started 2."


def test_a_rank_that_came_as_another_is_not_looked_for() -> None:
    text = diagnose(come(0, 0, changed="RANK is 0"), 3, 2)
    assert "Rank 1 of 3 has not come; its process came as rank 0." in text
    assert "On rank 1 RANK is 0." in text
    assert text.endswith(REMEDY)


def test_when_all_have_come_it_is_the_network() -> None:
    assert "`minddp doctor`" in diagnose(come(0, 1, 2), 3, 2)


@pytest.mark.parametrize(
    ("environment", "call", "expected"),
    [
        ({}, {}, Arrival(1, 2, "localhost", 29500, "")),
        ({"MASTER_PORT": "7"}, {}, Arrival(1, 2, "localhost", 7, "MASTER_PORT is 7, but the launcher set 29500")),
        ({}, {"rank": 0}, Arrival(0, 2, "localhost", 29500, "RANK is 0 by an argument, but the launcher set 1")),
        ({}, {"rank": -1, "world_size": 2}, Arrival(1, 2, "localhost", 29500, "")),
        (
            {},
            {"init_method": "tcp://localhost:29500", "rank": 1, "world_size": 2},
            Arrival(1, 2, "localhost", 29500, ""),
        ),
    ],
)
def test_how_a_rank_comes(
    environment: dict[str, str], call: dict[str, Any], expected: Arrival, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (LAUNCHED | environment).items():
        monkeypatch.setenv(name, value)
    assert Arrival.of(call, LAUNCHED) == expected


@pytest.mark.parametrize("call", [{"init_method": "file:///tmp/x"}, {"store": object()}])
def test_another_store_is_left_alone(call: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Arrival.of(call, LAUNCHED)
