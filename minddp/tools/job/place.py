"""The place of a rank in its job, as a launcher gives it in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minddp.platform import wording

TORCH_READS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # not MASTER_ADDR alone, which a .bashrc may set


class UsageError(ValueError):
    """Options or environment variables cannot work; the message has the remedy."""


@dataclass(frozen=True)
class Place:
    """The rank of this process and the address of the store. `restarts` counts those of the launcher.

    `hosts_store` is true on rank 0, except under torchrun, whose agent hosts the store.
    """

    rank: int
    world_size: int
    address: str
    port: int
    local_rank: int | None = None
    hosts_store: bool = False
    restarts: int = 0
    local_world_size: int = 1

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher has given to this process; `None` if no launcher has started it.

    Raises:
        UsageError: variables are missing or impossible.
    """
    if not any(name in environment for name in OF_A_RANK):
        return None
    numbers = [environment.get(name, "missing") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if (
        "MASTER_ADDR" not in environment
        or not all(map(str.isdecimal, numbers))
        or int(numbers[0]) >= int(numbers[1])
    ):
        found = wording.joined([f"{name}={environment.get(name, '')}" for name in TORCH_READS])
        raise UsageError(
            f"This would be one rank of a job, but its environment has {found}. Set all of them, with RANK from 0 "
            f"to WORLD_SIZE - 1, as torchrun does; or unset {wording.joined(OF_A_RANK)}, and minddp starts its "
            f"own ranks."
        )
    rank, world_size, port = map(int, numbers)
    return Place(
        rank,
        world_size,
        environment["MASTER_ADDR"],
        port,
        int(environment["LOCAL_RANK"]) if "LOCAL_RANK" in environment else None,
        hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
    )
