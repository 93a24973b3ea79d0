"""Starts ranks on this machine by torchrun, and reports how they ended.

Each rank is one process `python -m MODULE ARGUMENTS` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

GRACE_S = 30  # the launcher's default between SIGTERM and SIGKILL
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # of a terminal, or a batch system


class RanksFailed(RuntimeError):
    """The message names the rank that failed and how it ended; `exit_status` is its own, negative for a signal."""

    def __init__(self, message: str, exit_status: int):
        self.exit_status = exit_status
        super().__init__(message)


class Stopped(Exception):
    """A signal reached the launcher, which has passed it on, and every rank has ended."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        self.signal_name = signal.Signals(signal_number).name
        super().__init__(f"Stopped by {self.signal_name}.")


def launch(nproc: int, module: str, arguments: Sequence[str], max_restarts: int = 0) -> None:
    """Run `python -m module arguments` as `nproc` ranks on this machine, and wait until all have ended.

    When one fails, all are ended and started again, up to `max_restarts` times. Each rank has its own session, so
    Ctrl-C on the terminal reaches the launcher alone. The launcher gives the ranks that it ends 30 s to save.

    Raises:
        RanksFailed: a rank failed or was killed. Stopped: the launcher received a signal.
    """
    from torch.distributed import run as torchrun

    signals = ",".join(each.name for each in (*STOP_SIGNALS, signal.SIGQUIT))
    options = ["--standalone", "--local-addr=localhost", f"--signals-to-handle={signals}"]
    options += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    disabled = logging.root.manager.disable
    logging.disable()  # torch's launcher logs what `RanksFailed` and `Stopped` say
    try:
        with torch_errors_translated():
            torchrun.run(torchrun.get_args_parser().parse_args([*options, "-m", module, *arguments]))
    finally:
        logging.disable(disabled)


@contextmanager
def torch_errors_translated() -> Iterator[None]:
    """Raise the errors of torch's launcher as `RanksFailed` and `Stopped`."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        yield
    except ChildFailedError as error:
        raise ranks_failed(error) from None
    except SignalException as stopped:
        raise Stopped(stopped.sigval) from None
    except KeyboardInterrupt:  # before the launcher has installed its signal handlers
        raise Stopped(signal.SIGINT) from None


def ranks_failed(error: ChildFailedError) -> RanksFailed:
    """Names the rank to look at first: one failure causes others, and their times are known to the second only.

    A rank that dies makes the others fail at once. A rank that fails makes the launcher terminate the others and,
    after its 30 s of grace, kill those that hang.
    """
    first = min(failure.timestamp for failure in error.failures.values())
    early = {rank: each for rank, each in error.failures.items() if each.timestamp - first < GRACE_S / 2}
    cause = min(early, key=lambda rank: (early[rank].exitcode == -signal.SIGTERM, early[rank].exitcode > 0))
    failure = early[cause]
    how = f"failed with exit status {failure.exitcode}; its error is above"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    return RanksFailed(f"Rank {cause} (pid {failure.pid}) {how}.", failure.exitcode)
