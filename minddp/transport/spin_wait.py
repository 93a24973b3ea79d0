"""Polling before sleeping, where that makes a wait shorter.

[Note: spin wait]
A thread that waits in the kernel releases its core, and an idle core is put to sleep by the processor or, in a
virtual machine, by the host. Waking it takes 50 µs and more, and one collective needs several wake-ups: gloo's
broadcast wakes four threads in turn. So before a rank sleeps it polls for up to `SPIN_LIMIT_S`, and between two
polls it yields its core (`sched_yield`) to gloo's own threads. MPI libraries wait in the same way.

A rank does not spin for large messages: they keep gloo's threads busy, and polling takes time from them. It does
not spin where the host, or a container's quota, has fewer cores than ranks: a waiting rank must leave its core to a
computing one. It stops as soon as its core is preempted: it would get the core back only after a time slice of some
milliseconds, whereas a thread that sleeps is scheduled as soon as it wakes.

In shared memory a rank polls the counters of the others in the same way.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

import torch.distributed as dist

from minddp.platform.acceleration_switch import acceleration_is_on
from minddp.platform.host import usable_cores

SPIN_LIMIT_S = 0.05  # a rank that has not come by then is likely to take much longer
PREEMPTED_S = 0.0005  # a longer gap between two polls is a preemption, unless this process has used the time
MAX_WAITS_WITHOUT_SPIN = 256


class SpinWait:
    """Polls for at most `limit_s` seconds in each wait. After a preemption it skips some waits."""

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._waits_to_skip = 0
        self._next_waits_to_skip = 1

    def spin(self, is_over: Callable[[], object], limit_s: float = float("inf")) -> None:
        """Return once `is_over()`, or when it is better to sleep."""
        if min(limit_s, self.limit_s) <= 0:
            return
        if self._waits_to_skip > 0:
            self._waits_to_skip -= 1
            return
        start, cpu_time_at_start = time.monotonic(), time.process_time()
        now, end = start, start + min(limit_s, self.limit_s)
        while not is_over():
            os.sched_yield()
            _release_interpreter_lock(0)
            previous, now = now, time.monotonic()
            if now - previous > PREEMPTED_S:
                taken_by_others_s = now - start - (time.process_time() - cpu_time_at_start)
                if taken_by_others_s > PREEMPTED_S:
                    # Skip the next wait; after another preemption the next two, then four, and so on
                    self._waits_to_skip = self._next_waits_to_skip
                    self._next_waits_to_skip = min(2 * self._next_waits_to_skip, MAX_WAITS_WITHOUT_SPIN)
                    return
            if now > end:
                return
        self._next_waits_to_skip = 1


_release_interpreter_lock = select.poll().poll if hasattr(select, "poll") else time.sleep


def spin_wait_among(num_ranks: int) -> SpinWait:
    """The spin wait of one rank in a group of `num_ranks`. It never spins if there are too few cores."""
    most_on_host = dist.get_world_size() if dist.is_initialized() else num_ranks
    if (local_world_size := os.environ.get("LOCAL_WORLD_SIZE", "")).isdecimal():  # set by the launcher
        most_on_host = int(local_world_size)
    may_spin = hasattr(os, "sched_yield") and most_on_host <= usable_cores() and acceleration_is_on()
    return SpinWait(SPIN_LIMIT_S if may_spin else 0.0)
