"""`minddp.launch`: results in order, failures with each rank's traceback, and no process that stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.platform.host import is_running
from tests.processes import python

SCRIPT = """
import sys, time, torch, torch.distributed as dist, minddp

class Found:
    def __init__(self, rank, total): self.rank, self.total = rank, total

def body(rank, *args):
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    return Found(rank, total.item() + offset + sum(args))

def hangs(rank):
    import os, pathlib
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(300)

offset = 10
if __name__ == "__main__":
    if len(sys.argv) > 1:
        minddp.launch(hangs)
    found = minddp.launch(body, 1, 2, ranks=3)
    assert all(isinstance(one, Found) for one in found)
    print([(one.rank, one.total) for one in found])
    print(minddp.launch(lambda rank: rank * offset))
"""


def _pid(rank: int, share: torch.Tensor) -> tuple[int, torch.Tensor, int]:
    return os.getpid(), share + rank, torch.get_num_threads()


def _fails(rank: int, how: str) -> None:
    if how == "all raise":
        raise ValueError(f"not today on {rank}")
    if rank == 1 and how == "one raises":
        raise ValueError("not today")
    if rank == 1 and how == "one dies":
        os._exit(3)
    dist.barrier() if how != "one is late" else time.sleep(300)


def test_results_come_in_order_as_copies_and_no_rank_is_left() -> None:
    share = torch.arange(3, dtype=torch.float64)
    results = minddp.launch(_pid, share, ranks=3)
    assert [result.tolist() for _, result, _ in results] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert {result.dtype for _, result, _ in results} == {torch.float64}
    assert {threads for _, _, threads in results} == {1}
    assert share.tolist() == [0, 1, 2]
    assert not any(is_running(pid) for pid, _, _ in results)


def test_every_rank_that_raises_is_shown_with_its_traceback() -> None:
    with pytest.raises(minddp.RankFailure, match="not today on 1") as failure:
        minddp.launch(_fails, "all raise")
    assert failure.value.reports.keys() == {0, 1}
    for rank, report in failure.value.reports.items():
        assert "in _fails" in report
        assert f"ValueError: not today on {rank}" in report


@pytest.mark.parametrize(
    ("how", "report"),
    [("one raises", "ValueError: not today"), ("one dies", "died with exit code 3")],
)
def test_one_rank_fails_and_the_others_wait_for_it(how: str, report: str) -> None:
    before = set(_ranks_of_this_process())
    with pytest.raises(minddp.RankFailure) as failure:
        minddp.launch(_fails, how)
    assert report in failure.value.reports[1]
    assert set(_ranks_of_this_process()) <= before


def test_there_is_a_time_limit() -> None:
    before = set(_ranks_of_this_process())
    with pytest.raises(minddp.RankFailure) as failure:
        minddp.launch(_fails, "one is late", timeout_s=1)
    assert set(failure.value.reports.values()) == {"gave no answer in time and was killed"}
    assert set(_ranks_of_this_process()) <= before


def _ranks_of_this_process() -> list[int]:
    """The server of `multiprocessing` forks them, and is one of our children."""
    servers = [child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline())]
    return [rank.pid for server in servers for rank in server.children()]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(minddp.RankFailure, match="pickle"):
        minddp.launch(lambda rank: sys._getframe(), ranks=1)


def test_ranks_have_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def value(rank: int) -> Any:
        return os.environ.get("MINDDP_TEST_OF_LAUNCH")

    for wanted in ("1", "2"):
        monkeypatch.setenv("MINDDP_TEST_OF_LAUNCH", wanted)
        assert minddp.launch(value, ranks=1) == [wanted]


@pytest.mark.slow
def test_a_script_launches_its_own_functions_and_classes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = python("script.py", cwd=tmp_path)
    assert printed == "[(0, 19.0), (1, 19.0), (2, 19.0)]\n[0, 10]\n"


def test_ranks_end_when_the_process_that_launched_them_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    started = tmp_path / "started"
    started.mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # it leaves the folder in which the ranks met
    process = subprocess.Popen([sys.executable, "script.py", str(started)], cwd=tmp_path, env=environment)
    try:
        _wait_until(lambda: len(list(started.iterdir())) == 2)
    finally:
        process.kill()
        process.wait(30)
    pids = [int(path.name) for path in started.iterdir()]
    _wait_until(lambda: not any(is_running(pid) for pid in pids))


def _wait_until(condition: Any, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.05)
