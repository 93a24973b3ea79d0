"""Trainings that go wrong in silence, by real ranks with minddp's wrapper: what rank 0 reports."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.tools.watchdog.check import Check
from minddp.tools.watchdog.comparison import NotesComparison
from minddp.tools.watchdog.drift import DriftCheck
from minddp.tools.watchdog.guard import Guard
from tests.fakes import FakeTransport
from tests.ranks import RankPool, on_ranks, take_findings
from tests.tools.watchdog import bugs
from tests.tools.watchdog.bugs import BUGS, OF_A_WRAPPER, adam, batches, network, train
from tests.tools.watchdog.harness import DOCS, close, reports

ON_THREE_RANKS = OF_A_WRAPPER | {
    name: BUGS[name]
    for name in (
        "forward_of_the_unwrapped_model",
        "no_sync_that_never_ends",
        "a_method_of_the_module",
        "another_learning_rate",
        "a_checkpoint_of_rank_0",
        "same_data",
    )
}


def wrap(module: nn.Module | None = None, **options: Any) -> minddp.DistributedDataParallel:
    return minddp.DistributedDataParallel(network() if module is None else module, **options)


def findings(rank: int, name: str) -> list[str]:
    """The findings of this rank in a training, until its wrapper ends."""
    wrappers = []

    def wrap_and_keep(module: nn.Module) -> minddp.DistributedDataParallel:
        wrappers.append(wrap(module))
        return wrappers[-1]

    with reports() as logged, mock.patch.object(bugs, "DDP", wrap_and_keep):
        ON_THREE_RANKS[name][0](rank)
        dist.barrier()
        for ddp in wrappers:
            close(ddp)
    return [*logged]


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_rank_0_reports_what_is_wrong(ranks: Callable[[int], RankPool], name: str) -> None:
    (text,), *others = ranks(3).run(findings, name)
    assert all(words in text for words in ON_THREE_RANKS[name][1]), text
    assert others == [[], []]
    assert ranks(3).run(take_findings)[0][-1] == text  # what a search for false alarms looks at
    assert f"```text\n{text}\n```" in (DOCS / "guard.md").read_text(), "stale; see tests/tools/watchdog/pages.py"


def guards_threads() -> set[threading.Thread]:
    """Of this process; earlier tests may have left some that are about to end."""
    return {thread for thread in threading.enumerate() if thread.name == "minddp/guard"}


@on_ranks(2)
def test_a_copy_on_one_rank_is_compared_with_nothing(rank: int) -> None:
    """Rank 0 alone makes a copy, as for an average of the weights, and changes it."""
    before = guards_threads()
    with reports() as logged:
        ddp = wrap()
        if rank == 0:
            average = copy.deepcopy(ddp)
            average.module[0].weight.data.zero_()
        for wrapper in (wrap(), ddp):
            train(wrapper, adam(wrapper), batches(rank))
            close(wrapper)
    assert [*logged] == []
    assert guards_threads() <= before


@on_ranks(2)
def test_after_a_join_wrappers_are_compared_with_themselves(rank: int) -> None:
    """Rank 0 has no input under the `join` of the first of three wrappers."""
    with reports() as logged:
        for number, steps in enumerate(([0, 2], [2, 1], [2, 2])):
            ddp = wrap()
            ddp.module[0].weight.data.fill_(number)  # equal on all ranks, and different in each wrapper
            with ddp.join():
                train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.0), batches(rank, steps[rank]))
            close(ddp)
    assert [*logged] == []


def epoch_after_a_join(rank: int, momentum: float, synchronizes: bool) -> tuple[list[str], list[bytes]]:
    """Rank 1 runs out of inputs first. What minddp reports, and the final weights by both wrappers."""
    weights = []
    with reports() as logged:
        for wrapper in (wrap(), nn.parallel.DistributedDataParallel(network())):
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=momentum)
            with wrapper.join():
                train(wrapper, optimizer, batches(rank, 4 - 2 * rank))
            if synchronizes:
                wrap(wrapper.module, on_drift=None).synchronize(optimizer=optimizer)
            train(wrapper, optimizer, batches(10 + rank))
            weights.append(b"".join(param.detach().numpy().tobytes() for param in wrapper.parameters()))
            dist.barrier()
            if isinstance(wrapper, minddp.DistributedDataParallel):
                close(wrapper)
    return [*logged], weights


@pytest.mark.parametrize(("momentum", "synchronizes"), [(0.9, False), (0.9, True), (0.0, False)])
def test_after_a_join_replicas_that_differ_are_reported_and_no_others(
    ranks: Callable[[int], RankPool], momentum: float, synchronizes: bool
) -> None:
    """With momentum they differ by torch's wrapper, too: a rank that ran out first has another one."""
    (found, of_first), (_, of_second) = ranks(2).run(epoch_after_a_join, momentum, synchronizes)
    assert of_first[0] == of_first[1], "the wrappers agree"
    differ = of_first != of_second
    assert differ == (momentum > 0 and not synchronizes)
    assert [text for text in found if "optimizer's state differs" not in text] == []
    assert len(found) == differ


@on_ranks(2)
def test_the_thread_begins_with_training_and_ends_with_the_guard(rank: int) -> None:
    before = guards_threads()
    ddp = wrap()
    assert guards_threads() <= before
    train(ddp, adam(ddp), batches(rank))
    assert not guards_threads() <= before
    close(ddp)
    assert guards_threads() <= before


@on_ranks(2)
def test_a_wrapper_that_is_gone_keeps_no_memory(rank: int) -> None:
    """Also while the guard's thread makes its last turn."""
    goes_on, turn, others = threading.Event(), NotesComparison.turn, guards_threads()

    def long_turn(exchange: NotesComparison, is_last: bool = False) -> None:
        goes_on.wait(30)
        turn(exchange, is_last)

    with mock.patch.object(NotesComparison, "turn", long_turn):
        ddp = wrap()
        train(ddp, adam(ddp), batches(rank))
        params = [weakref.ref(param) for param in ddp.parameters()]
        del ddp
        gc.collect()
        left = sum(param() is not None for param in params)
        (thread,) = guards_threads() - others  # it has not ended yet
        goes_on.set()
        thread.join(10)
    assert left == 0


class Steps(Check):
    def __init__(self) -> None:
        self.num_begun = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_begun += 1


def test_a_guard_that_is_closed_sees_no_further_step() -> None:
    param, steps = nn.Parameter(torch.zeros(1)), Steps()
    optimizer, guard = torch.optim.SGD([param]), guard_of(param, steps)
    optimizer.step()
    guard.close()
    optimizer.step()
    assert steps.num_begun == 1


def guard_of(param: nn.Parameter, steps: Check) -> Guard:
    return Guard([("weight", param)], FakeTransport(2, store=dist.HashStore()), {"steps": steps})


def test_a_backward_that_is_dropped_is_not_counted() -> None:
    """Other ranks may drop theirs before the first gradient."""
    guard = guard_of(nn.Parameter(torch.zeros(1)), Steps())
    for _ in range(2):
        guard.first_gradient(0)
        guard.post_backward()
    assert guard.step == 0
    guard.first_gradient(0)
    guard.before_unpack()
    guard.post_backward()
    assert guard.step == 1
    guard.close()


@on_ranks(2)
def test_a_check_that_fails_ends_itself_and_not_the_training(rank: int) -> None:
    with reports() as logged, mock.patch.object(DriftCheck, "post_backward", side_effect=ArithmeticError):
        ddp = wrap()
        train(ddp, adam(ddp), batches(rank))
        close(ddp)
    assert [*logged] == ["A check of the guard has failed and is left out from now on."]


@on_ranks(2)
def test_on_drift_none_has_no_guard(rank: int) -> None:
    assert wrap(on_drift=None).guard is None
    assert wrap().guard is not None


def num_calls(run: Callable[[], object]) -> int:
    """How many functions of minddp are entered, in the threads of backward too; without those of a wait."""
    entered: list[str] = []
    folder = str(Path(minddp.__file__).parent)
    of_waits = str(Path(folder, "transport", "shared_memory"))  # a longer wait calls more of them

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_counted = code.co_filename.startswith(folder) and not code.co_filename.startswith(of_waits)
        if event == "call" and is_counted and not code.co_name.startswith("<"):
            entered.append(code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(entered)


@pytest.mark.parametrize(("find_unused", "no_sync"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_in_backward_few_functions_are_called_for_each_parameter(
    rank: int, find_unused: bool, no_sync: bool
) -> None:
    """In backwards 3 to 6, all of which the guard samples."""
    calls, num_layers = [], (10, 110)
    for layers in num_layers:
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        ddp = minddp.DistributedDataParallel(module, find_unused_parameters=find_unused)
        with ddp.no_sync() if no_sync else contextlib.nullcontext():
            calls.append([num_calls(ddp(torch.ones(2, 4)).sum().backward) for _ in range(6)][2:])
        close(ddp)
    more_params = 2 * (num_layers[1] - num_layers[0])
    of_steps = [(of_many - of_few) / more_params for of_few, of_many in zip(*calls, strict=True)]
    assert max(of_steps) < 5.5, of_steps
