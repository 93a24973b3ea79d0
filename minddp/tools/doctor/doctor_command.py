"""`minddp doctor`: start the ranks, or be one of them and print the report."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import tyro

from minddp.platform import streams
from minddp.tools.doctor.examination import BrokenCheck, Examination
from minddp.tools.job.launcher import RanksFailed, launch
from minddp.tools.job.place import Place, UsageError, place_of

DEFAULT_RANKS = 2


@dataclass(frozen=True)
class DoctorSettings:
    """Check whether a distributed job will work here, and what to do if not.

    Starts its own ranks on this machine. Started by torchrun, also on several hosts, it is one of the ranks:

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m minddp doctor

    If torchrun itself hangs, start one process on each host by hand, with RANK 0, 1, ...:

        RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 minddp doctor

    It ends with the first broken check. Exit status: 0 if nothing is broken, 1 if something is, 2 for a wrong
    command line. CUDA_VISIBLE_DEVICES= checks the CPU where there are GPUs.
    """

    nproc_per_node: int | None = None
    """Ranks to start on this machine, without torchrun; by default one for each GPU, or 2 on the CPU."""
    timeout_s: float = 30.0
    """How long to wait for other ranks, in each step."""

    def __post_init__(self) -> None:
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise UsageError(f"--nproc-per-node must be at least 1, but is {self.nproc_per_node}.")
        if not 0 < self.timeout_s < math.inf:
            raise UsageError(f"--timeout-s must be a positive, finite number, but is {self.timeout_s}.")


def main(arguments: Sequence[str]) -> int:
    """Run `minddp doctor`. Returns the exit status; as a rank, ends the process."""
    try:
        settings = tyro.cli(
            DoctorSettings, prog="minddp doctor", args=list(arguments), config=(tyro.conf.DisallowNone,)
        )
        place = place_of(os.environ)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _complain(error)
        return 2
    return start_ranks(settings, arguments) if place is None else be_rank(settings, place)


def start_ranks(settings: DoctorSettings, arguments: Sequence[str]) -> int:
    nproc = settings.nproc_per_node or streams.num_devices("cuda") or DEFAULT_RANKS
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    try:
        launch(nproc, "minddp", ["doctor", *arguments])
    except RanksFailed as error:
        if error.exit_status != 1:  # with status 1 there is a report
            _complain(error)
        return 1
    return 0


def be_rank(settings: DoctorSettings, place: Place) -> NoReturn:
    """Go through the checks, and end the process even if its threads hang."""
    # Discard what torch's C++ writes to standard error: stacks of errors that it also raises.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    status = 1
    try:
        Examination(place, settings.timeout_s, partial(print, flush=True)).run()
        status = 0
    except BrokenCheck:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _complain(error: Exception) -> None:
    print(f"minddp doctor: {error}", file=sys.stderr)
