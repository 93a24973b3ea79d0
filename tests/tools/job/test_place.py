"""A rank's place from its environment."""

from __future__ import annotations

import pytest

from minddp.tools.job.place import Place, UsageError, place_of

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"MASTER_ADDR": "left over", "PATH": "/bin"}, None),
        (TORCHRUN, Place(3, 4, "node1", 29500, 1, restarts=2)),
        ({**TORCHRUN, "RANK": "0"}, Place(0, 4, "node1", 29500, 1, restarts=2)),
        (BY_HAND, Place(0, 2, "node1", 29500, hosts_store=True)),
        ({**BY_HAND, "RANK": "1"}, Place(1, 2, "node1", 29500)),
    ],
)
def test_a_place(environment: dict[str, str], place: Place | None) -> None:
    """Without a launcher there is none; under torchrun no rank hosts the store, by hand rank 0 does."""
    assert place_of(environment) == place


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE=, MASTER_ADDR= and MASTER_PORT="),
        ({**BY_HAND, "RANK": "2"}, "RANK=2, WORLD_SIZE=2,"),
        ({**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT=http"),
    ],
)
def test_an_incomplete_place_is_an_error(environment: dict[str, str], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        place_of(environment)
