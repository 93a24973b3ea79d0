"""Where is a process while nothing of minddp waits in it? A thread looks at the main thread once a second.

The main thread waits for other ranks if its innermost frame is in torch's distributed code or waits for a `Work`,
or if its wrapper has all gradients and backward has not ended. It is one wait while this stays so, and no
collective is launched. If a wait becomes long, the ranks report their states: see `inquiry.py`.

The collectives that a process has launched, also those of torch's C++ code, are in torch's flight record, which is
on by default (`TORCH_FR_BUFFER_SIZE`). Where a version of torch has none for a backend, a report lacks them.
"""

from __future__ import annotations

import json
import linecache
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from minddp.platform.repeating_thread import RepeatingThread
from minddp.tools.watchdog.inquiry import Inquiry
from minddp.tools.watchdog.observer import TOPIC
from minddp.tools.watchdog.rank_state import ENDED, UNWATCHED, RankState, main_frame
from minddp.transport.process_group import ProcessGroupTransport

_log = logging.getLogger("minddp.tools.watchdog.inquiry")
LOOK_EVERY_S = 1.0
MOST_RECENT = 64  # collectives of a state
TORCH = Path(torch.__file__).parent
WAITS = (f"{TORCH}{os.sep}distributed{os.sep}", str(TORCH / "nn" / "parallel" / "distributed.py"))
CHECKPOINT = f"{os.sep}checkpoint{os.sep}"  # writes files
SAME_SIZE = {"all_reduce", "broadcast", "all_gather", "_all_gather_base", "reduce", "barrier"}  # on all ranks


class ProcessMonitor:
    """Asks and answers for this process, from `init_process_group` until `close` or the end of the group.

    `state` returns where training is. `on_stuck` is called when the ranks can never go on, in the thread.
    """

    def __init__(self, limit_s: float, state: Callable[[], RankState], on_stuck: Callable[[], object]):
        self._limit_s, self._state_of_training, self._on_stuck = limit_s, state, on_stuck
        self._inquiry: Inquiry | None = None
        self._wait: tuple[str, int] | None = None  # the call, and the number of the backward
        self._launched: object = None  # the latest collective in it
        self._since = 0.0
        self._is_stuck = False
        self._thread = RepeatingThread(self._turn, LOOK_EVERY_S, "minddp/watch")

    def close(self) -> None:
        if self._inquiry is not None:
            self._inquiry.left = UNWATCHED
        self._thread.close()

    def state(self) -> RankState:
        """This rank's answer."""
        state = replace(self._state_of_training(), recent=flight_record())
        if (wait := self._wait) is None:
            return state
        return replace(state, waiting_s=time.monotonic() - self._since, waits_in=wait[0])

    def _turn(self, is_last: bool) -> None:
        if self._inquiry is None and not is_last and dist.is_initialized() and dist.get_world_size() > 1:
            transport = ProcessGroupTransport(dist.group.WORLD, TOPIC)  # type: ignore[arg-type]
            self._inquiry = Inquiry(transport, self.state, ENDED)
            self._inquiry.group_end = transport.when_group_ends(self._leave)
        elif self._inquiry is not None and not self._is_stuck:
            self._look(self._inquiry, ends_by_error=is_last and getattr(sys, "last_value", None) is not None)
        if is_last:
            self._leave()

    def _leave(self) -> None:
        inquiry, self._inquiry, self._wait = self._inquiry, None, None
        if inquiry is not None:
            inquiry.close()

    def _look(self, inquiry: Inquiry, ends_by_error: bool) -> None:
        """Ask if this rank waits for long, or ends by an error: perhaps because another has ended before."""
        training, now = self._state_of_training(), time.monotonic()
        call = call_that_waits() or ("backward, at its end" if training.phase == "FINALIZING" else None)
        wait = None if call is None else (call, training.backward)
        if wait != self._wait:
            if self._wait is not None and now - self._since > self._limit_s:
                inquiry.messages.count("stalls")  # the next one has another number
            self._wait, self._since, self._launched = wait, now, None
        elif wait is not None:  # the record is long: it is not read in a step that goes on
            launched = next(reversed(flight_record()), None)
            self._since = self._since if self._launched in (None, launched) else now
            self._launched = launched
        waited_s = 0.0 if wait is None else now - self._since
        if waited_s == 0.0 and not ends_by_error:
            return
        stall = f"stall {inquiry.messages.count('stalls', add=0)}"
        if (reason := inquiry.examine(waited_s, self._limit_s, stall, lambda: False)) is not None:
            self._is_stuck = True
            if inquiry.claims("verdict"):
                _log.warning("The ranks cannot go on. %s", inquiry.settle(reason))
            self._on_stuck()


def call_that_waits() -> str | None:
    """The function of torch that other code has called in the main thread, if the innermost frame waits there."""
    frame, name = main_frame(), None
    if frame is not None:
        waited = re.search(r"(\w+)\.wait\(", linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0))
        name = "Work.wait" if waited and isinstance(frame.f_locals.get(waited[1]), dist.Work) else None
    while frame is not None and frame.f_code.co_filename.startswith(WAITS) and CHECKPOINT not in str(frame.f_code):
        if not frame.f_code.co_filename.endswith("c10d_logger.py"):  # of decorators
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        frame = frame.f_back
    return None if name is None else f"`{name}`"


def flight_record() -> dict[tuple[str, int], str]:
    """The latest collectives that this process has launched, by group and number."""
    recent = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        for entry in json.loads(dump()).get("entries", [])[-MOST_RECENT:] if dump is not None else ():
            backend, _, operation = entry["profiling_name"].partition(":")
            size = ""
            if operation in SAME_SIZE and entry["input_sizes"]:
                size = f" of {math.prod(entry['input_sizes'][0]):,} {entry['input_dtypes'][0].lower()}"
            if not entry["is_p2p"]:  # else made by two ranks only
                recent[f"{entry['process_group'][0]} ({backend})", entry["collective_seq_id"]] = (
                    f"{operation}{size}"
                )
    return recent
