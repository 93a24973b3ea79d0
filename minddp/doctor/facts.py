"""What a rank tells the others of itself, before any of them is connected. It travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Software:
    """Versions by name, and the environment variables that change what torch, NCCL, gloo or minddp do."""

    versions: Mapping[str, str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Machine:
    """The host that a rank runs on, as far as this process may use it.

    Ranks with equal `identity` share cores and memory. `cores` may be a fraction where a container has a quota.
    `shared_memory_bytes` is what is free in /dev/shm, `None` if there is no such thing; `open_files` is the soft
    limit. `load` is the number of processes that wanted a core during the last minute, ours among them.
    """

    name: str
    identity: str
    cores: float
    threads: int
    load: float
    memory_bytes: int
    shared_memory_bytes: int | None
    open_files: int


@dataclass(frozen=True)
class GPU:
    """`free_bytes` is known of the one that this rank would take."""

    name: str
    uuid: str
    memory_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True)
class Devices:
    """The GPUs that torch shows this rank, in order; and whether the host seems to have any."""

    gpus: tuple[GPU, ...] = ()
    driver_is_there: bool = False
    torch_has_cuda: bool = False


@dataclass(frozen=True)
class Interface:
    """A network interface and its addresses, IPv4 first."""

    addresses: tuple[str, ...]
    is_up: bool = True


@dataclass(frozen=True)
class Network:
    """How a rank is reached. Ranks with equal `identity` share interfaces, the loopback's among them.

    `name_addresses` are what the host's own name resolves to. `gloo_address` is where gloo will listen, `None` if
    it cannot. `store_address` is the end of the connection to the store that is here.
    """

    identity: str
    interfaces: Mapping[str, Interface]
    name_addresses: tuple[str, ...]
    gloo_address: str | None
    store_address: str

    def interface_of(self, address: str) -> str:
        """The name of the interface that has `address`."""
        names = [name for name, interface in self.interfaces.items() if address in interface.addresses]
        return names[0] if names else "lo" if address.startswith("127.") else "unknown interface"


@dataclass(frozen=True)
class RankFacts:
    """All of it."""

    rank: int
    world_size: int
    local_rank: int | None
    pid: int
    software: Software
    machine: Machine
    devices: Devices
    network: Network

    @property
    def own_gpu(self) -> GPU | None:
        """The GPU with this rank's local number; the only one that it sees, if there is only one."""
        gpus = self.devices.gpus
        if self.local_rank is not None and self.local_rank < len(gpus):
            return gpus[self.local_rank]
        return gpus[0] if len(gpus) == 1 else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> RankFacts:
        devices, network = told["devices"], told["network"]
        interfaces = {
            name: Interface(tuple(interface["addresses"]), interface["is_up"])
            for name, interface in network["interfaces"].items()
        }
        return cls(
            **{
                **told,
                "software": Software(**told["software"]),
                "machine": Machine(**told["machine"]),
                "devices": Devices(**{**devices, "gpus": tuple(GPU(**gpu) for gpu in devices["gpus"])}),
                "network": Network(
                    **{
                        **network,
                        "interfaces": interfaces,
                        "name_addresses": tuple(network["name_addresses"]),
                    }
                ),
            }
        )
