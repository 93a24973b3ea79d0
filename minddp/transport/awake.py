"""Waiting without falling asleep, for as long as that is the shorter way.

[Note: waiting awake]
A thread that waits in the kernel gives its core back, and a core with nothing to do is sent to sleep: by the
processor, or, in a virtual machine, by the host. To wake one takes 50 µs and more, and what a rank waits for is
rarely one event. A broadcast by gloo wakes four threads one after another, each on a core that has just fallen
asleep. So before a rank sleeps it looks, again and again, for up to `AWAKE_S`, whether what it waits for is there,
and each time it offers its core to whoever wants to run (`sched_yield`), so that gloo's own threads, which want to,
are not kept from it. MPI's libraries wait like this for the same reason.

It is only done where each rank of the host can have a core of its own. Where there are fewer cores than ranks, or a
container may not use them fully, who waits leaves its core to who computes.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

import torch.distributed as dist

from minddp.cores import usable_cores

AWAKE_S = 0.05  # a rank that is later than this has had something else to do, and may take as long again


def awake_s() -> float:
    """For how long the ranks of this host stay awake while they wait, in seconds: 0 if they had better not."""
    can_yield = hasattr(os, "sched_yield") and hasattr(select, "poll")
    return AWAKE_S if can_yield and most_ranks_on_this_host() <= usable_cores() else 0.0


def most_ranks_on_this_host() -> int:
    """As many as the launcher says, or else all there are."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else dist.get_world_size()


def stay_awake(is_over: Callable[[], object], limit_s: float) -> None:
    """Return when `is_over` says so, or after `limit_s` seconds. Without waiting if that is 0."""
    if limit_s <= 0:
        return
    end = time.monotonic() + limit_s
    let_other_threads_run = select.poll().poll  # of nothing, which lets go of Python's lock
    while not is_over() and time.monotonic() < end:
        os.sched_yield()
        let_other_threads_run(0)
