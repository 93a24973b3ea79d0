"""Starts ranks on this machine by torch's own launcher, and reports how they ended.

Each rank is one process `python -m MODULE ARGUMENTS` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

GRACE_S = 30  # the launcher's default between SIGTERM and SIGKILL


class RanksFailed(RuntimeError):
    """A rank failed or was killed; the message names the rank and how it ended.

    `exit_status` is that rank's, negative for a signal.
    """

    def __init__(self, message: str, exit_status: int):
        self.exit_status = exit_status
        super().__init__(message)


class Stopped(Exception):
    """A signal reached the launcher; the launcher has passed it on, and every rank has ended."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}.")


def launch(nproc: int, module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module arguments` as `nproc` ranks on this machine, and wait until all have ended.

    Each rank has its own session, so Ctrl-C on the terminal reaches the launcher alone. The launcher passes the
    signal on and gives the ranks 30 s to save and leave. When one rank fails, it ends the others in the same way.

    Raises:
        RanksFailed: a rank failed or was killed. Stopped: the launcher received a signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: any free port
        local_addr="localhost",
        max_restarts=0,
    )
    disabled = logging.root.manager.disable
    logging.disable()  # what torch's launcher logs `RanksFailed` and `Stopped` say once
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        raise RanksFailed(describe_failure(error), error.failures[cause_of(error)].exitcode) from None
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    except KeyboardInterrupt:  # before the launcher has installed its signal handlers
        raise Stopped(signal.SIGINT) from None
    finally:
        logging.disable(disabled)


def describe_failure(error: ChildFailedError) -> str:
    """How the rank to look at first has ended, and which ranks hung after that."""
    rank = cause_of(error)
    failure = error.failures[rank]
    how = f"failed with exit status {failure.exitcode}; its error is above"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    hanging = "".join(f" Rank {rank} did not answer and was killed then." for rank in _hung(error))
    return f"Rank {rank} (pid {failure.pid}) {how}.{hanging}"


def cause_of(error: ChildFailedError) -> int:
    """The rank to look at first: one failure causes others, and their times are known to the second only.

    A rank that dies makes the others fail at once. A rank that fails makes the launcher terminate the others and,
    after its 30 s of grace, kill those that hang.
    """
    hung = _hung(error)

    def remoteness(rank: int) -> tuple[bool, bool]:
        exitcode = error.failures[rank].exitcode
        return rank in hung or exitcode == -signal.SIGTERM, exitcode > 0

    return min(error.failures, key=remoteness)


def _hung(error: ChildFailedError) -> list[int]:
    first = min(failure.timestamp for failure in error.failures.values())
    return [rank for rank, failure in error.failures.items() if failure.timestamp - first > GRACE_S / 2]
