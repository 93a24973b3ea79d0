"""`minddp doctor`: start the ranks, or be one of them and print the report."""

from __future__ import annotations

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


@dataclass(frozen=True)
class DoctorSettings:
    """Check whether a distributed job will work here, and what to do if not.

    Starts a rank for each GPU of this machine, or 2 on the CPU. Started by torchrun, it is one of the ranks:

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m minddp doctor

    It ends with the first broken check. Exit status: 0 if nothing is broken, 1 if something is, 2 for a wrong
    command line. CUDA_VISIBLE_DEVICES= checks the CPU where there are GPUs.
    """

    timeout_s: float = 30.0
    """How long to wait for other ranks, in each step."""


def main(arguments: Sequence[str]) -> int:
    """Run `minddp doctor`. Returns the exit status; as a rank, ends the process."""
    try:
        settings = tyro.cli(
            DoctorSettings, prog="minddp doctor", args=list(arguments), config=(tyro.conf.DisallowNone,)
        )
        place = place_of(os.environ)
    except UsageError as error:
        print(f"minddp doctor: {error}", file=sys.stderr)
        return 2
    if place is not None:
        be_rank(settings, place)
    try:
        launch(streams.num_devices("cuda") or 2, "minddp", ["doctor", *arguments])
    except RanksFailed as error:
        if error.exit_status != 1:  # with status 1 there is a report
            print(f"minddp doctor: {error}", file=sys.stderr)
        return 1
    return 0


def be_rank(settings: DoctorSettings, place: Place) -> NoReturn:
    """Go through the checks, and end the process even if its threads hang."""
    # Discard what torch's C++ writes to standard error: stacks of errors that it also raises.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
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
        os._exit(status)
