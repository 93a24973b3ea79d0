"""Trainings that go wrong in silence, by three real ranks: what rank 0 reports."""

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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import minddp
from minddp.tools.watchdog.check import Check
from minddp.tools.watchdog.comparison import NotesComparison
from minddp.tools.watchdog.drift import DriftCheck
from minddp.tools.watchdog.guard import Guard
from tests.fakes import FakeTransport
from tests.ranks import RankPool, take_findings
from tests.tools.watchdog.drifting import SCENARIOS, close, findings, reports, sgd, train, wrap
from tests.tools.watchdog.fleet import checks_of
from tests.tools.watchdog.guard_page import PAGE

EXPECTED = [
    ("another_learning_rate", "`lr of group 0` is 0.1 on ranks 0 and 2, but 0.2 on rank 1"),
    ("checkpoint_on_one_rank", "Rank 0 has other values of `0.weight`, `1.weight`"),
    ("optimizer_of_one_rank", "the optimizer's state differs (only one rank has loaded a checkpoint"),
    (
        "write_on_one_rank",
        "equal in step 12, different in step 13). The averaged gradients were equal, and no hyperparameter",
    ),
    ("bare_module", "Gradients are not averaged: 20 optimizer steps"),
    ("no_sync_for_good", "Gradients are not averaged: 20 optimizer steps"),
    ("every_fifth_step_alone", "An optimizer made 2 steps for 1 synchronised backward"),
    ("hook_that_forgets", "the communication hook `"),
    ("same_data", "All 3 ranks train on the same data"),
]


@pytest.mark.parametrize(("name", "words"), EXPECTED)
def test_rank_0_reports_what_is_wrong(ranks: Callable[[int], RankPool], name: str, words: str) -> None:
    (text,), *others = ranks(3).run(findings, name)
    assert words in text
    assert others == [[], []]
    assert ranks(3).run(take_findings)[0][-1] == text  # what a search for false alarms looks at
    assert f"```text\n{text}\n```" in PAGE.read_text(), (
        "docs/guard.md is stale; see tests/tools/watchdog/guard_page.py"
    )


def test_calm_training_is_reported_by_no_rank(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(3).run(findings, "calm") == [[], [], []]


def test_every_scenario_is_expected_to_say_something() -> None:
    assert {name for name, _ in EXPECTED} == SCENARIOS.keys() - {"calm"}


def guards_threads() -> set[threading.Thread]:
    """Of this process; earlier tests may have left some that are about to end."""
    return {thread for thread in threading.enumerate() if thread.name == "minddp/guard"}


def guards_of_copies(rank: int) -> tuple[list[str], int]:
    """Rank 0 alone makes a copy, as for an average of the weights, and changes it."""
    before = guards_threads()
    with reports() as logged:
        ddp = wrap()
        if rank == 0:
            average = copy.deepcopy(ddp)
            with torch.no_grad():
                average.module[0].weight.zero_()
        other = wrap()
        train(rank, other, sgd(other))
        train(rank, ddp, sgd(ddp))
        for wrapper in (ddp, other):
            close(wrapper)
    return logged, len(guards_threads() - before)


def test_a_copy_on_one_rank_is_compared_with_nothing(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(guards_of_copies) == [([], 0), ([], 0)]


def guards_after_a_join(rank: int) -> list[str]:
    """Rank 0 has no input under the `join` of the first of three wrappers."""
    with reports() as logged:
        for number, steps in enumerate(([0, 2], [2, 1], [2, 2])):
            ddp = wrap()
            with torch.no_grad():
                ddp.module[0].weight.fill_(number)  # equal on all ranks, and different in each wrapper
            with ddp.join():
                for _ in range(steps[rank]):
                    ddp(torch.randn(8, 16)).square().mean().backward()
            close(ddp)
    return logged


def test_after_a_join_wrappers_are_compared_with_themselves(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(guards_after_a_join) == [[], []]


def epoch_after_a_join(rank: int, momentum: float, synchronizes: bool) -> tuple[list[str], list[bytes]]:
    """Rank 1 runs out of inputs first. What minddp reports, and the final weights by both wrappers."""
    weights = []
    with reports() as logged:
        for wrapper in (wrap(), nn.parallel.DistributedDataParallel(wrap(on_drift=None).module)):
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=momentum)
            with wrapper.join():
                train(rank, wrapper, optimizer, steps=4 - 2 * rank)
            if synchronizes:
                minddp.DistributedDataParallel(wrapper.module, on_drift=None).synchronize(optimizer=optimizer)
            train(rank, wrapper, optimizer)
            weights.append(b"".join(param.detach().numpy().tobytes() for param in wrapper.parameters()))
            dist.barrier()
            if isinstance(wrapper, minddp.DistributedDataParallel):
                close(wrapper)
    return logged, weights


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


def threads_left(rank: int) -> list[bool]:
    """Whether there is none, before, in and after training."""
    before = guards_threads()
    ddp = wrap()
    seen = [guards_threads() <= before]
    train(rank, ddp, sgd(ddp))
    seen.append(guards_threads() <= before)
    close(ddp)
    return [*seen, guards_threads() <= before]


def test_the_thread_begins_with_training_and_ends_with_the_guard(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(threads_left) == [[True, False, True]] * 2


def parameters_left(rank: int) -> int:
    """How many parameters outlive their wrapper while the guard's thread makes its last turn."""
    goes_on, turn, others = threading.Event(), NotesComparison.turn, guards_threads()

    def long_turn(exchange: NotesComparison, is_last: bool = False) -> None:
        goes_on.wait(30)
        turn(exchange, is_last)

    with mock.patch.object(NotesComparison, "turn", long_turn):
        ddp = wrap()
        train(rank, ddp, sgd(ddp))
        params = [weakref.ref(param) for param in ddp.parameters()]
        del ddp
        gc.collect()
        left = sum(param() is not None for param in params)
        (thread,) = guards_threads() - others  # it has not ended yet
        goes_on.set()
        thread.join(10)
    return left


def test_a_wrapper_that_is_gone_keeps_no_memory(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(parameters_left) == [0, 0]


def test_checks_that_are_abandoned_refer_to_no_parameter() -> None:
    params = [(str(place), nn.Parameter(torch.ones(100))) for place in range(4)]
    seen = [weakref.ref(param) for _, param in params]
    checks = checks_of(list(params), starts_equal=True)
    exchange = NotesComparison(0, 2, checks, dist.HashStore())
    params.clear()
    gc.collect()
    assert all(param() is not None for param in seen)
    exchange.abandon()
    gc.collect()
    assert all(param() is None for param in seen)


class Steps(Check):
    def __init__(self) -> None:
        self.num_begun = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_begun += 1


def test_a_guard_may_be_collected_while_an_optimizer_calls_its_hooks() -> None:
    """As garbage is, at any moment: torch goes through all hooks, and fails if some go missing."""

    class Collects(Steps):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            guards.clear()

    param, steps, guards = nn.Parameter(torch.zeros(1)), Steps(), list[Guard]()
    optimizer = torch.optim.SGD([param])
    first = guard_of(param, Collects())
    guards.append(guard_of(param, steps))
    optimizer.step()
    first.close()
    assert steps.num_begun == 0


def num_step_hooks() -> tuple[int, int]:
    return len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)


def test_guards_that_are_gone_leave_no_hook_behind() -> None:
    """A search over hyperparameters wraps hundreds of modules in one process: each left two hooks of all steps."""
    param = nn.Parameter(torch.zeros(1))
    first = guard_of(param, Steps())
    before = num_step_hooks()
    others = [guard_of(param, Steps()) for _ in range(20)]
    others[0].close()
    others.clear()
    gc.collect()
    assert num_step_hooks() == before
    first.close()


def test_a_guard_that_is_closed_sees_no_further_step() -> None:
    param, steps = nn.Parameter(torch.zeros(1)), Steps()
    optimizer, guard = torch.optim.SGD([param]), guard_of(param, steps)
    optimizer.step()
    guard.close()
    optimizer.step()
    assert steps.num_begun == 1


def guard_of(param: nn.Parameter, steps: Check) -> Guard:
    return Guard([("weight", param)], FakeTransport(2, store=dist.HashStore()), {"steps": steps})


def test_a_check_that_fails_ends_itself_and_not_the_training(ranks: Callable[[int], RankPool]) -> None:
    for logged in ranks(2).run(with_a_broken_check):
        assert logged == ["A check of the guard has failed and is left out from now on."]


def fails(check: DriftCheck) -> None:
    raise ArithmeticError


def with_a_broken_check(rank: int) -> list[str]:
    with reports() as logged, mock.patch.object(DriftCheck, "post_backward", fails):
        ddp = wrap()
        train(rank, ddp, sgd(ddp))
        close(ddp)
    return logged


def test_on_drift_none_has_no_guard(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(has_guard) == [(False, True)] * 2


def has_guard(rank: int) -> tuple[bool, bool]:
    return wrap(on_drift=None).guard is not None, wrap().guard is not None


def num_calls(run: Callable[[], object]) -> int:
    """How many functions of minddp are entered, in the threads of backward too."""
    entered: list[str] = []
    folder = str(Path(minddp.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and not code.co_name.startswith("<"):
            entered.append(code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(entered)


def calls_for_each_parameter(rank: int, find_unused: bool, no_sync: bool) -> list[float]:
    """In backwards 3 to 6, all of which the guard samples."""
    calls, num_layers = [], (10, 110)
    for layers in num_layers:
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        ddp = minddp.DistributedDataParallel(module, find_unused_parameters=find_unused)
        assert ddp.guard is not None
        with ddp.no_sync() if no_sync else contextlib.nullcontext():
            calls.append([num_calls(ddp(torch.ones(2, 4)).sum().backward) for _ in range(6)][2:])
        close(ddp)
    more_params = 2 * (num_layers[1] - num_layers[0])
    return [(of_many - of_few) / more_params for of_few, of_many in zip(*calls, strict=True)]


@pytest.mark.parametrize(("find_unused", "no_sync"), [(False, False), (True, False), (False, True)])
def test_in_backward_few_functions_are_called_for_each_parameter(
    ranks: Callable[[int], RankPool], find_unused: bool, no_sync: bool
) -> None:
    for of_steps in ranks(2).run(calls_for_each_parameter, find_unused, no_sync):
        assert max(of_steps) < 5.5, of_steps
