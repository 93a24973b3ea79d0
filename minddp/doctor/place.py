"""A rank's place in the job, as the launcher's environment variables tell it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TELLTALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # MASTER_ADDR alone may be there from somebody's .bashrc


class PlaceError(ValueError):
    """The environment contradicts itself or is not complete; the message says what to do."""


@dataclass(frozen=True)
class Place:
    """Which rank this is, and where all meet. `round` counts the launcher's restarts.

    `local_rank` is `None` where the launcher does not tell. With torchrun no rank `hosts_store`: its agent does.
    """

    rank: int
    world_size: int
    address: str
    port: int
    local_rank: int | None = None
    local_world_size: int | None = None
    hosts_store: bool = False
    round: int = 0

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Where a launcher has put this process, `None` if none has.

    Raises:
        PlaceError: the launcher has said only half of it, or what cannot be.
    """
    told = [name for name in TELLTALE if name in environment]
    if not told:
        return None
    missing = [name for name in REQUIRED if name not in environment]
    if missing:
        raise PlaceError(
            f"{', '.join(told)} {'is' if len(told) == 1 else 'are'} set, so this would be one rank of a job, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not. Set all of {', '.join(REQUIRED)}, "
            f"as torchrun does; or unset {', '.join(told)}, and minddp doctor starts its own ranks."
        )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise PlaceError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks count from 0 to WORLD_SIZE - 1.")
    return Place(
        rank,
        world_size,
        environment["MASTER_ADDR"],
        _number(environment, "MASTER_PORT"),
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else None,
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None,
        hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        round=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise PlaceError(f"{name}={environment[name]} is not a number.")
    return int(environment[name])
