"""`minddp doctor`: start the ranks, or be one of them, go through the checks and print the report."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
import tyro

from minddp.platform import streams
from minddp.platform.store import Messages
from minddp.tools.doctor import verdicts
from minddp.tools.doctor.measurement import Sheets, collect, measure, run_on_all
from minddp.tools.doctor.verdicts import CheckResult, Severity
from minddp.tools.job.launcher import RanksFailed, launch
from minddp.tools.job.place import Place, UsageError, place_of
from minddp.tools.job.store_connection import StoreUnreachable, first_line, open_store

LEAVE_LIMIT_S = 3.0


def main(arguments: Sequence[str]) -> int:
    """Run `minddp doctor`. Returns the exit status; as a rank, ends the process."""
    return tyro.cli(doctor, prog="minddp doctor", args=list(arguments))


def doctor(timeout_s: float = 30.0) -> int:
    """Check whether a distributed job will work here, and what to do if not.

    Starts a rank for each GPU of this machine, or 2 on the CPU. Started by torchrun, it is one of the ranks:

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m minddp doctor

    It ends with the first broken check. Exit status: 0 if nothing is broken, 1 if something is, 2 for a wrong
    command line. CUDA_VISIBLE_DEVICES= checks the CPU where there are GPUs.

    Args:
        timeout_s: How long to wait for other ranks, in each step.
    """
    try:
        place = place_of(os.environ)
    except UsageError as error:
        print(f"minddp doctor: {error}", file=sys.stderr)
        return 2
    if place is not None:
        be_rank(place, timeout_s)
    try:
        launch(streams.num_devices("cuda") or 2, "minddp", ["doctor", "--timeout-s", str(timeout_s)])
    except RanksFailed as error:
        if error.exit_status != 1:  # with status 1 there is a report
            print(f"minddp doctor: {error}", file=sys.stderr)
        return 1
    return 0


def be_rank(place: Place, limit_s: float) -> NoReturn:
    """Go through the checks, and end the process even if its threads hang."""
    # Discard what torch's C++ writes to standard error: stacks of errors that it also raises.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    status = 1
    try:
        Examination(place, limit_s, partial(print, flush=True)).run()
        status = 0
    except BrokenCheck:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


# ---------------------------------------------------------------------- the checks in order


class BrokenCheck(Exception):
    """A broken check makes the next ones impossible."""


class Examination:
    """Runs the checks on one rank. Each check needs the results of the earlier ones.

    Each waits for other ranks at most about `limit_s`, a measurement thrice. `show` prints a result, on rank 0 and
    on a rank that has not met rank 0.
    """

    def __init__(self, place: Place, limit_s: float, show: Callable[[CheckResult], None]):
        self._place = place
        self._limit_s = limit_s
        self._show = show
        self._sheets: Sheets = {}  # of the ranks that have arrived

    def run(self) -> None:
        """All checks until one is broken, then raises BrokenCheck."""
        place = self._place
        try:
            store = open_store(place, self._limit_s)
        except StoreUnreachable as error:
            self._show(verdicts.judge_obstacle(place, error))
            raise BrokenCheck from None
        # Ranks with another WORLD_SIZE, or from before a restart, are not in this job.
        topic = f"minddp/tools/doctor/{place.restarts}/{place.world_size}"
        messages = Messages(store, topic, place.rank, place.world_size)
        try:
            self._check(messages)
        except dist.DistError as error:
            fact = f"The store at {place.endpoint} is lost: {first_line(error)}."
            remedy = "See the output of rank 0 and its launcher."
            self._show(CheckResult("rendezvous", Severity.BROKEN, fact, remedy))
            raise BrokenCheck from None
        finally:
            self._leave(messages)

    def _check(self, messages: Messages) -> None:
        limit_s, device = self._limit_s, choose_device(self._place)
        messages.post(collect(device, os.environ, limit_s), "sheet")
        sheets = self._sheets = messages.gather("sheet", limit_s=limit_s)
        self._tell(verdicts.judge_arrivals(self._place, sheets, limit_s))
        self._tell(*verdicts.judge_settings(sheets))
        measuring = partial(measure, messages, device, limit_s)
        link, errors = run_on_all(messages, measuring, 3 * limit_s)
        self._tell(verdicts.judge_network(sheets, errors))
        assert link is not None, "without it there is an error"
        self._tell(verdicts.judge_link(link))

    def _tell(self, *results: CheckResult) -> None:
        if self._place.rank == 0 or 0 not in self._sheets:
            for result in results:
                self._show(result)
        if any(result.severity is Severity.BROKEN for result in results):
            raise BrokenCheck

    def _leave(self, messages: Messages) -> None:
        """End with the others: a launcher ends all ranks with the first, and the store has to outlive their use."""
        with suppress(dist.DistError):
            messages.post(True, "left")
            limit_s = LEAVE_LIMIT_S if self._place.rank == 0 else 4 * self._limit_s
            messages.gather("left", limit_s=limit_s, ranks=list(self._sheets))


def choose_device(place: Place) -> torch.device:
    """A GPU, if each rank of this host can have its own."""
    if streams.num_devices("cuda") < place.local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank or 0)
