"""Which rank am I, according to the environment?"""

from __future__ import annotations

import pytest

from minddp.doctor.place import Place, PlaceError, place_of

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_nobody_has_launched_this() -> None:
    assert place_of({"MASTER_ADDR": "left over", "PATH": "/bin"}) is None


def test_torchrun_tells_all_and_hosts_the_store_itself() -> None:
    assert place_of(TORCHRUN) == Place(3, 4, "node1", 29500, 1, 2, hosts_store=False, round=2)
    place = place_of({**TORCHRUN, "RANK": "0"})
    assert place is not None
    assert not place.hosts_store


def test_by_hand_rank_0_hosts_the_store() -> None:
    first, second = place_of(BY_HAND), place_of({**BY_HAND, "RANK": "1"})
    assert first is not None
    assert second is not None
    assert (first.hosts_store, second.hosts_store) == (True, False)
    assert first.local_rank is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "RANK is set, .* but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
        ({**BY_HAND, "RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT=http is not a number"),
    ],
)
def test_half_a_place_is_an_error(environment: dict[str, str], words: str) -> None:
    with pytest.raises(PlaceError, match=words):
        place_of(environment)
