"""Waiting without falling asleep, for as long as that is the shorter way.

[Note: waiting awake]
A thread that waits in the kernel gives its core back, and a core with nothing to do is sent to sleep: by the
processor, or, in a virtual machine, by the host. To wake one takes 50 µs and more, and what a rank waits for is
rarely one event. A broadcast by gloo wakes four threads one after another, each on a core that has just fallen
asleep. So before a rank sleeps it looks, again and again, for up to `AWAKE_S`, whether what it waits for is there,
and each time it offers its core to whoever wants to run (`sched_yield`), so that gloo's own threads, which want to,
are not kept from it. MPI's libraries wait like this for the same reason.

It is only done for messages that gloo sends in little time: with many MiB its threads never rest, so no core falls
asleep, and who looks again and again takes time from them. And only where each rank of the host can have a core of
its own: where there are fewer cores than ranks, or a container may not use them fully, who waits leaves its core
to who computes. And it is given up as soon as another process takes the core to compute. The core comes back after
a slice of some milliseconds then, whereas who sleeps is let in at once when it wakes.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

import torch.distributed as dist

from minddp.platform.cores import usable_cores

AWAKE_S = 0.05  # a rank that is later than this has had something else to do, and may take as long again
TAKEN_S = 0.0005  # for how long other processes may take the core
MOST_WAITS_ASLEEP = 256


class Wakefulness:
    """Whether a rank stays awake while it waits; learns from how that has gone.

    `limit_s` is the most seconds of one wait, 0 for never.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._waits_asleep = 0  # still to come
        self._next_waits_asleep = 1

    def stay_awake(self, is_over: Callable[[], object], limit_s: float = float("inf")) -> None:
        """Return when `is_over` says so, or when it is better to sleep until then."""
        if min(limit_s, self.limit_s) <= 0:
            return
        if self._waits_asleep > 0:
            self._waits_asleep -= 1
            return
        start, ours_at_start = time.monotonic(), time.process_time()
        now, end = start, start + min(limit_s, self.limit_s)
        while not is_over():
            os.sched_yield()
            _let_other_threads_run(0)
            before, now = now, time.monotonic()
            if now - before > TAKEN_S and now - start - (time.process_time() - ours_at_start) > TAKEN_S:
                self._fall_asleep()
                return
            if now > end:
                return
        self._next_waits_asleep = 1

    def _fall_asleep(self) -> None:
        """Also in the next wait; if the core is wanted again after that, in the next two, and so on."""
        self._waits_asleep = self._next_waits_asleep
        self._next_waits_asleep = min(2 * self._next_waits_asleep, MOST_WAITS_ASLEEP)


_let_other_threads_run = select.poll().poll if hasattr(select, "poll") else time.sleep  # drops Python's lock


def wakefulness(num_ranks: int) -> Wakefulness:
    """That of a rank of this host, in a group of `num_ranks`."""
    each_has_a_core = hasattr(os, "sched_yield") and most_ranks_on_this_host(num_ranks) <= usable_cores()
    return Wakefulness(AWAKE_S if each_has_a_core else 0.0)


def most_ranks_on_this_host(num_ranks: int) -> int:
    """As many as the launcher says, or else all there are; those of our group if it is the only one."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal():
        return int(told)
    return dist.get_world_size() if dist.is_initialized() else num_ranks
