"""`minddp.watch`: the checks of minddp's wrapper, for torch's classes and loops without one."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import minddp
from minddp.tools.watchdog import comparison
from minddp.tools.watchdog.watch import TrainingGoesWrong, Watch
from tests.ranks import RankPool, of_all_ranks, on_ranks
from tests.tools.launch import jobs
from tests.tools.watchdog import bugs
from tests.tools.watchdog.bugs import BUGS, WAITS, adam, batches, network, train
from tests.tools.watchdog.calm import CALM
from tests.tools.watchdog.harness import DOCS, Logged, close, patiently, reports, run_apart, wait_until

METHODS = ("_pre_forward", "_post_forward", "_match_all_reduce_for_bwd_pass")


@contextmanager
def watching() -> Iterator[Logged]:
    """Collect the messages that this rank logs while the training is watched."""
    modules, add = [], Watch.add

    def add_and_keep(self: Watch, module: nn.Module, *optimizer: Any) -> None:
        modules.append(module)  # what is gone compares its last notes some time later
        add(self, module, *optimizer)

    with reports() as logged, mock.patch.object(Watch, "add", add_and_keep), patiently():
        watch = Watch(finds_modules=True)
        try:
            yield logged
            dist.barrier()
        finally:
            watch.close()


def said_of(rank: int, names: list[str]) -> dict[str, Logged]:
    """The messages that this rank logs in each training."""
    said = {}
    for name in names:
        with watching() as said[name]:
            (CALM.get(name) or BUGS[name][0])(rank)
    return said


@pytest.fixture(scope="module")
def said(ranks: Callable[[int], RankPool]) -> dict[str, Logged]:
    """What rank 0 says of each bug; the others say nothing."""
    of_0, of_1 = ranks(2).run(said_of, [*BUGS])
    assert not any(of_1.values())
    return of_0


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_found_and_named(said: dict[str, Logged], name: str) -> None:
    (text,) = said[name]
    assert all(words in text for words in BUGS[name][1]), text
    assert text in (DOCS / "watch.md").read_text(), "stale; see tests/tools/watchdog/pages.py"


@pytest.mark.slow
def test_calm_trainings_are_silent(ranks: Callable[[int], RankPool]) -> None:
    for said in ranks(2).run(said_of, [*CALM]):
        assert {name: [*texts] for name, texts in said.items() if texts} == {}


def said_of_a_wait(rank: int, name: str, stuck_after_s: float = 1.0, scale: float = 1.0) -> Logged:
    """A rank is busy elsewhere for `scale` times as long."""
    with reports() as logged, mock.patch.object(bugs, "BUSY", scale):
        watch = Watch(stuck_after_s=stuck_after_s, finds_modules=True)
        with suppress(RuntimeError):  # of gloo, after its time limit
            WAITS[name][0](rank)
        watch.close()
    return logged


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_explained(name: str) -> None:
    of_0, of_1 = run_apart(2, said_of_a_wait, name, group_timeout_s=10.0)
    line = [*of_0, *of_1][0].splitlines()[0]
    assert all(words in line for words in WAITS[name][1]), line


def weights(rank: int, is_watched: bool) -> tuple[bytes, float]:
    """After some steps, with dropout, and a number that is drawn then."""
    torch.manual_seed(rank)
    ddp = DDP(nn.Sequential(network(), nn.Dropout(0.3), nn.BatchNorm1d(4)))
    if is_watched:
        watch = minddp.watch(ddp)
    train(ddp, adam(ddp), batches(rank))
    if is_watched:
        watch.close()
    flat = torch.cat([value.reshape(-1).double() for value in ddp.state_dict().values()])
    return flat.numpy().tobytes(), torch.rand(()).item()


@on_ranks(2)
def test_bits_and_random_numbers_are_those_without_it(rank: int) -> None:
    assert weights(rank, is_watched=True) == weights(rank, is_watched=False)


@on_ranks(2)
def test_a_loop_without_a_wrapper_has_the_checks_that_fit_it(rank: int) -> None:
    model = network()
    watch = minddp.watch(model)
    (guard,) = watch._guards.values()
    assert guard.checks.keys() == {"drift", "same data", "not finite"}
    del guard
    watch.close()
    assert not model._forward_pre_hooks


@on_ranks(2)
def test_nothing_is_left_behind(rank: int) -> None:
    log = logging.getLogger("minddp.tools.watchdog")
    before = [getattr(DDP, name) for name in METHODS], [*log.handlers]
    ddp = DDP(network())
    watch = minddp.watch(ddp)
    assert [getattr(DDP, name) for name in METHODS] != before[0]
    with pytest.raises(RuntimeError, match="watched already"):
        minddp.watch(ddp, raises=True)
    train(ddp, adam(ddp), batches(rank, 3))
    watch.close()
    assert ([getattr(DDP, name) for name in METHODS], [*log.handlers]) == before


@on_ranks(2)
def test_what_cannot_be_watched_is_refused(rank: int) -> None:
    with pytest.raises(TypeError, match="takes a module with parameters that require grad, not list"):
        minddp.watch([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave `on_drift=None` out"):
        minddp.watch(minddp.DistributedDataParallel(network(), on_drift=None))


@on_ranks(2)
def test_the_wrapper_of_minddp_is_watched_by_its_own_guard(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(network())
    watch = minddp.watch(ddp)
    train(ddp, adam(ddp, lr=1e-2 * (1 + rank)), batches(rank))
    dist.barrier()
    close(ddp)
    watch.close()
    assert [len(found) for found in of_all_ranks([it.check for it in watch.findings])] == [1, 0]


@on_ranks(2)
def test_the_first_finding_ends_the_training_if_asked_for(rank: int, tmp_path: Path) -> None:
    model, file = network(), tmp_path / "found.jsonl"
    watch = minddp.watch(model, raises=True, json=str(file))
    optimizer = adam(model)
    raises = pytest.raises(TrainingGoesWrong, match="they are not averaged") if rank == 0 else nullcontext()
    with mock.patch.object(comparison, "EVERY_S", 0.05), raises:
        train(model, optimizer, batches(rank, 60))  # it may be found before these have ended
        wait_until(lambda: rank != 0 or watch.findings)
        optimizer.step()
    if rank == 0:
        (line,) = map(json.loads, file.read_text().splitlines())
        assert (line["check"], line["ranks"], line["step"]) == ("drift", [0, 1], 1)
    dist.barrier()
    watch.close()


# ---------------------------------------------------------------------- commands

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from tests.tools.watchdog.bugs import DDP, adam, batches, network, train
dist.init_process_group("gloo")
rank, ddp = dist.get_rank(), DDP(network())
assert ddp.__class__.__module__.startswith("torch."), ddp
def act(step):
    time.sleep(0.5 if sys.argv[1] in ("dies", "stops") and step < 6 else 0)  # a thread looks once a second
    if rank == 1 and step == 5 and sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and step == 5 and sys.argv[1] == "stops":
        os.system(f"(sleep 18; kill -CONT {os.getpid()}) &")
        os.kill(os.getpid(), signal.SIGSTOP)
f = ddp.module if sys.argv[1] == "bypass" else ddp
train(f, adam(ddp), batches(rank), act)
dist.destroy_process_group()
"""

LAUNCH = ("exec", "--watch", "--", sys.executable)


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    return jobs.start(*command, cwd=folder, PYTHONPATH=str(jobs.ROOT), **variables)


def output_of(folder: Path, *command: str) -> str:
    return jobs.end_of(start(folder, *command)).stderr


@pytest.mark.slow
def test_a_bypass_under_the_command(tmp_path: Path) -> None:
    said = output_of(tmp_path, "watch", "--watch-json", "found.jsonl", "script.py", "bypass")
    assert said.count(bugs.NEVER_SYNCHRONISED) == 1
    lines = (tmp_path / "found.jsonl").read_text().splitlines()
    assert [json.loads(line)["check"] for line in lines] == ["bypass"]


@pytest.mark.slow
def test_any_launcher(tmp_path: Path) -> None:
    launch = (*LAUNCH, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py")
    assert bugs.NEVER_SYNCHRONISED in output_of(tmp_path, *launch, "bypass")
    assert "minddp" not in output_of(tmp_path, *launch, "calm").replace("minddp watch", "")


@pytest.mark.slow
def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    said = output_of(tmp_path, "watch", "script.py", "stops")
    assert "Rank 1 is stopped, by a signal (SIGSTOP, Ctrl-Z) or a debugger; `kill -CONT` lets a process" in said


@pytest.mark.slow
def test_a_rank_that_dies(tmp_path: Path) -> None:
    """Without a launcher, which would end the other rank, and name the one that died."""
    with socket.socket() as free:
        free.bind(("", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [start(tmp_path, *LAUNCH, "script.py", "dies", RANK=str(rank), **place) for rank in range(2)]
    said = [jobs.end_of(process).stderr for process in started]
    assert "The ranks cannot go on. Rank 1 has exited; its own output says why." in said[0]
