"""`init_process_group` below `minddp run` and `exec`: says what keeps the ranks from meeting, which torch does not.

[Note: what the launcher gave]
Torchrun gives each rank its number and the address of a store that the launcher hosts. If a script sets
MASTER_PORT, as tutorials without a launcher do, all ranks wait for a store that does not exist; if it sets RANK,
two ranks come as one, and all wait for one that never comes. So each rank remembers the environment of its start,
and comes to the launcher's store beside torch's call. A store that does not answer is an error after 5 s, a rank
that comes as another one at once. All else is a warning after 20 s: a script may number its ranks anew or host a
store elsewhere.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch.distributed as dist

from minddp.compat.install import bound_to
from minddp.platform.wording import ranks
from minddp.tools.watchdog.board import Board

_log = logging.getLogger(__name__)
REPORT_AFTER_S = 20.0
STORE_LIMIT_S = 5.0  # for a store to answer
POLL_S = 0.5
TORCH_READS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMEDY = "Remove what sets it: a launcher's ranks need neither os.environ nor arguments for this."


class Arrival(NamedTuple):
    """How a rank comes to `init_process_group`: as `rank` of `size`, to which store; what the script `changed`."""

    rank: int
    size: int
    host: str
    port: int
    changed: str

    @classmethod
    def of(cls, call: Mapping[str, Any], launched: Mapping[str, str]) -> Arrival:
        """From the arguments of a call and the environment. Raises ValueError where torch uses another store."""
        url = urlparse(call.get("init_method") or "env://")
        if call.get("store") is not None or url.scheme not in ("env", "tcp"):
            raise ValueError("no TCP store")
        passed: dict[str, Any] = {"RANK": call.get("rank"), "WORLD_SIZE": call.get("world_size")}
        if url.scheme == "tcp":
            passed |= {"MASTER_ADDR": url.hostname, "MASTER_PORT": url.port}
        given = {name: str(value) for name, value in passed.items() if value not in (None, -1)}
        used = {name: given.get(name, os.environ.get(name, "")) for name in launched if name in TORCH_READS}
        changed = "; ".join(
            f"{name} is {value}{' by an argument' if name in given else ''}, but the launcher set {launched[name]}"
            for name, value in used.items()
            if value != launched[name]
        )
        rank, size, port = (int(used[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, size, used["MASTER_ADDR"], port, changed)


class Meeting:
    """A rank comes to the launcher's store before `init_process_group`; until `close` a thread says who is missing.

    Raises RuntimeError if the launcher hosts none.
    """

    def __init__(self, ours: Arrival, launched: Mapping[str, str]):
        self._ours = ours
        self._rank, self._size = int(launched["RANK"]), int(launched["WORLD_SIZE"])
        self._ranks_per_node = int(launched["LOCAL_WORLD_SIZE"])
        limit, port = datetime.timedelta(seconds=STORE_LIMIT_S), int(launched["MASTER_PORT"])
        store = dist.TCPStore(launched["MASTER_ADDR"], port, is_master=False, timeout=limit, wait_for_workers=False)
        self._board = Board(store, self._rank)
        self._board.open(f"minddp/{launched['TORCHELASTIC_RESTART_COUNT']}")
        self._board.write(ours, self._rank)
        self._since, self._report_after_s = time.monotonic(), REPORT_AFTER_S
        self.close = self._board.close

    def begin(self) -> None:
        """Raises RuntimeError if another rank has come as this one, or no store answers, and none will."""
        ours = self._ours
        if self._board.add(1, ours.host, ours.port, ours.rank) > 1:
            come = {rank: other for rank, other in self._arrivals().items() if other[:4] == ours[:4]}
            raise RuntimeError(
                f"minddp: {ranks([*come])} come to init_process_group as rank {ours.rank} of {ours.size}, so other "
                f"ranks would wait for ever. {' '.join(_changes(come))}"
            )
        deadline = time.monotonic() + STORE_LIMIT_S
        while ours.changed and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            try:
                socket.create_connection((ours.host, ours.port), POLL_S).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"minddp: init_process_group would wait for ever for a store at {ours.host}:{ours.port} "
                        f"({error}), where the launcher hosts none: {ours.changed}. {REMEDY}"
                    ) from None
                time.sleep(POLL_S)
        self._board.start(self._turn, POLL_S, "minddp meeting")

    def _arrivals(self) -> dict[int, Arrival]:
        """Those that have come, by the launcher's ranks."""
        come = {rank: self._board.read(rank) for rank in range(self._size)}
        return {rank: arrival for rank, arrival in come.items() if arrival is not None}

    def _turn(self, is_last: bool) -> None:
        """The first rank that has come warns after 20 s, and whenever three times as long is over."""
        waited_s = time.monotonic() - self._since
        if is_last or waited_s < self._report_after_s:
            return
        self._report_after_s = 3 * waited_s
        come = self._arrivals()
        if self._rank == min(come):
            diagnosis = diagnose(come, self._size, self._ranks_per_node)
            _log.warning("init_process_group has not returned after %.0f s. %s", waited_s, diagnosis)


def diagnose(come: Mapping[int, Arrival], num_started: int, ranks_per_node: int) -> str:
    """Which ranks are missing, and what differs from the launcher's values."""
    size = next(iter(come.values())).size
    lines = []
    for rank in sorted(set(range(size)) - {arrival.rank for arrival in come.values()}):
        where = f"its process, on node {rank // ranks_per_node}, has ended or does something else first"
        if rank in come:
            where = f"its process came as rank {come[rank].rank}"
        elif rank >= num_started:
            where = f"the launcher has started {num_started}"
        lines.append(f"Rank {rank} of {size} has not come; {where}.")
    if not (lines := [*lines, *_changes(come)]):
        lines = ["All ranks have come, so they do not reach each other; `minddp doctor` examines the network."]
    return " ".join(lines)


def _changes(come: Mapping[int, Arrival]) -> list[str]:
    """What the scripts have changed, with the remedy."""
    changes = [f"On rank {rank} {arrival.changed}." for rank, arrival in come.items() if arrival.changed]
    return [*changes, REMEDY] if changes else []


def watch_meeting(launched: Mapping[str, str]) -> None:
    """Watch `init_process_group` for the rest of this process, a rank. See [Note: what the launcher gave]."""
    watched = watching(dist.init_process_group, launched)
    for module, name in bound_to(dist.init_process_group):
        setattr(module, name, watched)


def watching(init_process_group: Callable[..., None], launched: Mapping[str, str]) -> Callable[..., None]:
    """Torch's function, watched in a rank whose launcher gave it the environment `launched`."""
    signature = inspect.signature(init_process_group)

    @functools.wraps(init_process_group)
    def init(*args: Any, **kwargs: Any) -> None:
        try:
            meeting = Meeting(Arrival.of(signature.bind_partial(*args, **kwargs).arguments, launched), launched)
        except (ValueError, RuntimeError):  # another kind of store, or the launcher hosts none
            return init_process_group(*args, **kwargs)
        try:
            meeting.begin()
            init_process_group(*args, **kwargs)
        finally:
            meeting.close()

    return init
