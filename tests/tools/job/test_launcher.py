"""The failure to look at first, under torch's launcher.

The tests of `train`, `run` and `doctor` start ranks by it that end well, fail, are killed or are stopped.
"""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from minddp.tools.job.launcher import ranks_failed


def failures(*ends: tuple[int, int]) -> ChildFailedError:
    """The launcher's report on ranks 0, 1, ... with pids 70, 71, ..., each with its exit status and time."""
    found = {}
    for rank, (exitcode, timestamp) in enumerate(ends):
        found[rank] = ProcessFailure(local_rank=rank, pid=70 + rank, exitcode=exitcode, error_file="")
        found[rank].timestamp = timestamp
    return ChildFailedError("minddp", found)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        # A killed rank makes the others fail.
        ([(1, 100), (-signal.SIGKILL, 100)], "Rank 1 (pid 71) was killed by SIGKILL."),
        # A failed rank has the others terminated.
        ([(-signal.SIGTERM, 100), (3, 100)], "Rank 1 (pid 71) failed with exit status 3; its error is above."),
        # One waits for the other, which the launcher kills after its grace period.
        ([(-signal.SIGKILL, 130), (1, 100)], "Rank 1 (pid 71) failed with exit status 1; its error is above."),
    ],
)
def test_the_failure_to_look_at_first(ends: list[tuple[int, int]], says: str) -> None:
    assert str(ranks_failed(failures(*ends))) == says
