"""Below `minddp run` and `exec`: reports why the ranks do not meet in `init_process_group`, which torch does not.

[Note: what the launcher gave]
Torchrun gives each rank its number and the address of a store that the launcher hosts. If a script sets
MASTER_PORT, as tutorials without a launcher do, all ranks wait for a store that does not exist; if it sets RANK,
two processes register the same rank, so one rank is missing and the others wait for it. So each rank keeps the
environment of its start, and posts its arrival in the launcher's store before torch's call. A store that does not
answer is an error after 5 s, a rank that arrives twice at once. Anything else is a warning after 20 s: a script may
number its ranks anew or host a store elsewhere.
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
from minddp.platform.repeating_thread import RepeatingThread
from minddp.platform.store import Messages, own_connection
from minddp.platform.wording import ranks
from minddp.tools.job.place import TORCH_READS

_log = logging.getLogger(__name__)
REPORT_AFTER_S = 20.0
STORE_LIMIT_S = 5.0  # for a store to answer
POLL_S = 0.5
REMEDY = "Remove what sets it: a launcher's ranks need neither os.environ nor arguments for this."


class Arrival(NamedTuple):
    """How a process calls `init_process_group`. `changed` is a text on variables that the script has changed."""

    rank: int
    size: int
    host: str
    port: int
    changed: str

    @classmethod
    def of(cls, call: Mapping[str, Any], launched: Mapping[str, str]) -> Arrival:
        """From the arguments of a call and the environment. Raises ValueError if there is no TCP store."""
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


def post_arrival(ours: Arrival, launched: Mapping[str, str]) -> Messages:
    """Messages in the launcher's store. Raises RuntimeError if the launcher hosts none."""
    limit, port = datetime.timedelta(seconds=STORE_LIMIT_S), int(launched["MASTER_PORT"])
    store = dist.TCPStore(launched["MASTER_ADDR"], port, is_master=False, timeout=limit, wait_for_workers=False)
    topic = f"minddp/{launched['TORCHELASTIC_RESTART_COUNT']}"
    rank, world_size = int(launched["RANK"]), int(launched["WORLD_SIZE"])
    messages = Messages.open(own_connection(store), topic, rank, world_size)
    messages.post(ours, "arrival")
    return messages


def require_arrival(ours: Arrival, messages: Messages) -> None:
    """Raises RuntimeError if another process has arrived as this rank, or no store answers."""
    if messages.count("rank", ours.host, ours.port, ours.rank) > 1:
        arrivals = messages.gather("arrival", limit_s=0.0)
        same = {rank: other for rank, other in arrivals.items() if other[:4] == ours[:4]}
        raise RuntimeError(
            f"minddp: {ranks([*same])} come to init_process_group as rank {ours.rank} of {ours.size}, so other "
            f"ranks would wait for ever. {' '.join(_changes(same))}"
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


def warn_of_missing(messages: Messages, ranks_per_node: int) -> Callable[[bool], None]:
    """The turn of a thread: the lowest rank that has arrived warns after 20 s, then after 60 s, 180 s, ..."""
    began, report_after_s = time.monotonic(), REPORT_AFTER_S

    def turn(is_last: bool) -> None:
        nonlocal report_after_s
        waited_s = time.monotonic() - began
        if is_last or waited_s < report_after_s:
            return
        report_after_s = 3 * waited_s
        arrivals = messages.gather("arrival", limit_s=0.0)
        if messages.rank == min(arrivals):
            diagnosis = diagnose(arrivals, messages.world_size, ranks_per_node)
            _log.warning("init_process_group has not returned after %.0f s. %s", waited_s, diagnosis)

    return turn


def diagnose(come: Mapping[int, Arrival], num_started: int, ranks_per_node: int) -> str:
    """Names the missing ranks, and the values that differ from the launcher's."""
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
    """The variables that scripts have changed, with the remedy."""
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
            ours = Arrival.of(signature.bind_partial(*args, **kwargs).arguments, launched)
            messages = post_arrival(ours, launched)
        except (ValueError, RuntimeError):  # another kind of store, or the launcher hosts none
            return init_process_group(*args, **kwargs)
        require_arrival(ours, messages)
        turn = warn_of_missing(messages, int(launched["LOCAL_WORLD_SIZE"]))
        thread = RepeatingThread(turn, POLL_S, "minddp meeting")
        try:
            init_process_group(*args, **kwargs)
        finally:
            thread.close()

    return init
