"""Where is this process, when nothing of minddp waits in it? A thread looks at the main thread once a second.

The main thread waits for other ranks if its innermost frame is in torch's distributed code, in `Work.wait`, or if
its wrapper has all gradients and backward has not ended. As long as it waits in the same place, and no other wait
has begun, this is one wait. If it becomes long, the ranks report their states: see `inquiry.py`.

Which collectives a rank has launched, those of torch's C++ code included, is in the flight record of torch, which
all groups share. It is on by default (`TORCH_FR_BUFFER_SIZE`). A version of torch without one for this backend
leaves that part of a report empty.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minddp.platform.repeating_thread import RepeatingThread
from minddp.tools.watchdog.diagnosis import diagnose
from minddp.tools.watchdog.inquiry import Inquiry
from minddp.tools.watchdog.rank_state import ENDED, RankState, main_frame, where_is_main_thread
from minddp.transport.process_group import ProcessGroupTransport

_log = logging.getLogger("minddp.tools.watchdog")
TOPIC = "minddp/watch"
LOOK_EVERY_S = 1.0
MOST_RECENT = 64  # collectives of a state
TORCH = Path(torch.__file__).parent
WAITS = (f"{TORCH}{os.sep}distributed{os.sep}", str(TORCH / "nn" / "parallel" / "distributed.py"))
WAIT = "wait_for_ranks"  # of `Work.wait`
SAME_SIZE = {"all_reduce", "broadcast", "all_gather", "_all_gather_base", "reduce", "barrier"}  # on all ranks


class ProcessMonitor:
    """Watches this process from the first `init_process_group` on, until `close` or the end of that group.

    `state` returns where training is. `on_stuck` is called, in the thread, when the ranks cannot go on.
    """

    def __init__(self, limit_s: float, state: Callable[[], RankState], on_stuck: Callable[[], object]):
        self._limit_s, self._state_of_training, self._on_stuck = limit_s, state, on_stuck
        self._inquiry: Inquiry | None = None
        self._num_waits = [0]  # that have begun
        self._wait: tuple[object, ...] | None = None  # where, and how many waits had begun
        self._since = 0.0
        self._is_stuck = False
        self._undo = watching_waits(self._num_waits)
        self._thread = RepeatingThread(self._turn, LOOK_EVERY_S, "minddp/watch")

    def close(self) -> None:
        self._undo.close()
        self._thread.close()

    def state(self) -> RankState:
        """This rank's state."""
        waited_s = None if self._wait is None else time.monotonic() - self._since
        return replace(
            self._state_of_training(),
            process=f"{socket.gethostname()}, pid {os.getpid()}",
            recent=flight_record(),
            waiting_s=waited_s,
            waits_in="" if self._wait is None else str(self._wait[0]),
            where=where_is_main_thread(),
        )

    def _turn(self, is_last: bool) -> None:
        if self._inquiry is None and not is_last and dist.is_initialized() and dist.get_world_size() > 1:
            transport = ProcessGroupTransport(dist.group.WORLD, TOPIC)  # type: ignore[arg-type]
            assert transport.store is not None, "torch made the group"
            self._inquiry = Inquiry(transport.store, transport.rank, transport.world_size, self.state, how_it_ended)
            self._inquiry.group_end = transport.when_group_ends(self._leave)
        elif self._inquiry is not None and is_last:
            if getattr(sys, "last_value", None) is not None:
                self._report_ended(self._inquiry)
            self._leave()
        elif self._inquiry is not None:
            self._look(self._inquiry)

    def _leave(self) -> None:
        inquiry, self._inquiry, self._wait = self._inquiry, None, None
        if inquiry is not None:
            inquiry.close()

    def _look(self, inquiry: Inquiry) -> None:
        training = self._state_of_training()
        call = call_that_waits() or ("the end of backward" if training.phase == "FINALIZING" else None)
        wait = None if call is None else (call, self._num_waits[0], training.backward)
        if wait != self._wait:
            if self._wait is not None and time.monotonic() - self._since > self._limit_s:
                inquiry.messages.count("stalls")  # the next one has another number
            self._wait, self._since = wait, time.monotonic()
        elif wait is not None and not self._is_stuck:
            stall, waited_s = inquiry.messages.count("stalls", add=0), time.monotonic() - self._since
            reason = inquiry.examine(waited_s, self._limit_s, f"stall {stall}", lambda: False)
            if reason is not None:
                self._is_stuck = True
                reason = inquiry.settle(reason)
                if inquiry.claims("verdict"):
                    _log.warning("The ranks cannot go on. %s", reason)
                self._on_stuck()

    def _report_ended(self, inquiry: Inquiry) -> None:
        """This rank ends by an error, perhaps because another one has ended before."""
        for rank, absence in inquiry.absences().items():
            if inquiry.claims(f"end of rank {rank}"):
                _log.warning("%s", diagnose({rank: absence}).text.splitlines()[0])


def how_it_ended() -> str:
    """Why this process leaves its group."""
    error = getattr(sys, "last_value", None)
    return ENDED if error is None else f"{ENDED}, by {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def call_that_waits() -> str | None:
    """The function of torch that other code has called in the main thread, if its innermost frame waits there."""
    frame, name = main_frame(), None
    while frame is not None and (frame.f_code.co_filename.startswith(WAITS) or frame.f_code.co_name == WAIT):
        if not frame.f_code.co_filename.endswith("c10d_logger.py"):  # of decorators
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        frame = frame.f_back
    return None if name is None else f"`{'Work.wait' if name.endswith(WAIT) else name}`"


def watching_waits(num_waits: list[int]) -> ExitStack:
    """Count the calls of `Work.wait`, and give each a frame, until the result is closed."""
    wait = dist.Work.wait

    def wait_for_ranks(self: dist.Work, *args: Any, **kwargs: Any) -> bool:
        num_waits[0] += 1
        return wait(self, *args, **kwargs)

    dist.Work.wait = wait_for_ranks  # type: ignore[method-assign]
    undo = ExitStack()
    undo.callback(setattr, dist.Work, "wait", wait)
    return undo


def flight_record() -> dict[tuple[str, int], str]:
    """The latest collectives that this process has launched, by group and number, as far as torch records them."""
    recent = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        for entry in json.loads(dump())["entries"][-MOST_RECENT:] if dump is not None else ():
            backend, _, operation = entry["profiling_name"].partition(":")
            size = ""
            if operation in SAME_SIZE and entry["input_sizes"]:
                size = f" of {math.prod(entry['input_sizes'][0]):,} {entry['input_dtypes'][0].lower()}"
            if not entry["is_p2p"]:  # made by two ranks only
                group = f"{entry['process_group'][0]} ({backend})"
                recent[group, entry["collective_seq_id"]] = f"{operation}{size}"
    return recent
