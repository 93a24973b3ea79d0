"""Below `minddp run` and `exec`: reports which ranks do not come to `init_process_group`, which torch does not.

Before torch's call each rank posts its arrival in the store that the launcher hosts. A common reason is a script
that sets RANK or MASTER_PORT, as tutorials without a launcher do: then two processes are the same rank, or all wait
for a store that does not exist. So an arrival lists the launcher's values that the script has changed.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from minddp.compat.install import bound_to
from minddp.platform import wording
from minddp.platform.repeating_thread import RepeatingThread
from minddp.platform.store import Messages
from minddp.tools.job.place import TORCH_READS

_log = logging.getLogger(__name__)
REPORT_EVERY_S = 30.0
STORE_LIMIT_S = 5.0  # for the launcher's store to answer


def watch_meeting(launched: Mapping[str, str]) -> None:
    """Watch `init_process_group` for the rest of this process. `launched` is the environment of its start."""
    init_process_group = dist.init_process_group

    @functools.wraps(init_process_group)
    def watched(*args: Any, **kwargs: Any) -> None:
        try:
            messages = post_arrival(launched)
        except RuntimeError:  # the launcher hosts no store
            return init_process_group(*args, **kwargs)
        thread = RepeatingThread(functools.partial(report, messages), REPORT_EVERY_S, "minddp meeting")
        try:
            init_process_group(*args, **kwargs)
        finally:
            thread.close()

    for module, name in bound_to(init_process_group):
        setattr(module, name, watched)


def post_arrival(launched: Mapping[str, str]) -> Messages:
    limit, port = datetime.timedelta(seconds=STORE_LIMIT_S), int(launched["MASTER_PORT"])
    store = dist.TCPStore(launched["MASTER_ADDR"], port, is_master=False, timeout=limit, wait_for_workers=False)
    topic = f"minddp/{launched['TORCHELASTIC_RESTART_COUNT']}"
    messages = Messages.open(store, topic, int(launched["RANK"]), int(launched["WORLD_SIZE"]))
    changed = {name: os.environ.get(name) for name in TORCH_READS if os.environ.get(name) != launched[name]}
    messages.post([f"{name} is {value} instead of {launched[name]}" for name, value in changed.items()], "arrival")
    return messages


def report(messages: Messages, is_last: bool) -> None:
    """The turn of a thread while torch's call does not return: the lowest rank that has arrived warns."""
    arrivals = messages.gather("arrival", limit_s=0.0)
    if not is_last and messages.rank == min(arrivals):
        _log.warning("init_process_group has not returned yet. %s", diagnose(arrivals, messages.world_size))


def diagnose(arrivals: Mapping[int, list[str]], world_size: int) -> str:
    """Names the ranks that have come, those that are missing, and what scripts have changed."""
    lines = [f"{wording.subject([*arrivals], 'has', 'have')} come."]
    if missing := [rank for rank in range(world_size) if rank not in arrivals]:
        have = wording.subject(missing, "has", "have")
        lines.append(f"{have} not: its process has ended, or does something else first.")
    if changes := [f"On rank {rank} {', '.join(changed)}." for rank, changed in arrivals.items() if changed]:
        lines += [*changes, "Leave these variables as the launcher has set them."]
    elif not missing:
        lines.append("Arguments of the call or the network keep them apart; `minddp doctor` examines the network.")
    return " ".join(lines)
