"""A gloo group that notes which collectives are called."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "barrier"),
    *("reduce_scatter", "_reduce_scatter_base", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv"),
)


class Event(NamedTuple):
    """A gradient is complete, or a collective begins, which carries `tensors`."""

    kind: str
    tensors: Sequence[Tensor]


def join_watched(rank: int, world_size: int, rendezvous: str) -> None:
    """Join a gloo group that notes in its `events` which collectives are called, from Python or from C++."""

    def noted(name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **options: Any) -> Any:
            group.events.append(Event("message", [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]))
            time.sleep(group.delays[0])
            work = getattr(group.inner, name)(*args, **options)
            time.sleep(group.delays[1])
            return work

        return call

    def make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        methods: dict[str, Any] = {name: noted(name) for name in COLLECTIVES}
        methods["getBackendName"] = lambda group: "watched"
        group = type("Watched", (dist.ProcessGroup,), methods)(rank, size)
        group.inner, group.events = dist.ProcessGroupGloo(store, rank, size, timeout), []
        group.store, group.questions, group.delays = store, 0, (0.0, 0.0)
        return group

    dist.Backend.register_backend("watched", make, devices=["cpu"])
    dist.init_process_group("watched", init_method=rendezvous, rank=rank, world_size=world_size)


def events() -> list[Event]:
    return dist.group.WORLD.events  # type: ignore[union-attr]


def is_well_everywhere(fault: Any) -> bool:
    """Has no rank found a fault? It asks by no message, which may meet one of the class's own.

    A rank that has found one does not wait for the others, which may hang.
    """
    group: Any = dist.group.WORLD
    group.questions += 1
    group.store.set(f"{group.questions} {dist.get_rank()}", "no" if fault else "yes")
    answers = (group.store.get(f"{group.questions} {rank}") for rank in range(dist.get_world_size()))
    return not fault and all(answer == b"yes" for answer in answers)


@contextmanager
def delays(before: float, after: float) -> Iterator[None]:
    """Each message of this rank begins that many seconds late, and its caller goes on that many after."""
    group: Any = dist.group.WORLD
    group.delays = before, after
    yield
    group.delays = 0.0, 0.0
