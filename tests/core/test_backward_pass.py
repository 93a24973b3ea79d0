"""The phases, and the state of one backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from minddp.core.backward_pass import ALLOWED, BackwardPass, Phase
from minddp.core.bucket import Bucket
from minddp.core.bucket_store import BucketStore
from minddp.core.events import EventStream
from minddp.core.mode import Mode
from minddp.core.packing import LARGE_BYTES
from minddp.core.plan import BucketPlan, ParamSpec
from minddp.core.reducer import Reducer
from minddp.core.reduction import AllReduceStrategy
from minddp.core.usage_tracker import UsageTracker
from minddp.options import UNBOUNDED
from tests.fakes import FakeTransport


class Bare:
    """A reducer's pass without the reducer."""

    def __init__(self, phase: Phase):
        self.phase = phase
        self.current: Bare | None = self
        self.hooks_left = self.reductions = self.groups_left = []

    def _bind_hooks(self) -> None: ...


@pytest.mark.parametrize("start", [phase for phase in Phase if phase is not Phase.IDLE])
@pytest.mark.parametrize("end", [phase for phase in Phase if phase is not Phase.PREPARED])
def test_a_transition_that_is_not_allowed_is_an_error(start: Phase, end: Phase) -> None:
    reducer = Bare(start)
    if end in ALLOWED[start]:
        Reducer._enter(reducer, end)
        assert reducer.phase is end
        assert (reducer.current is None) == (end is Phase.IDLE)
    else:
        with pytest.raises(RuntimeError, match=f"phase {start.name} cannot become {end.name}"):
            Reducer._enter(reducer, end)
        assert reducer.phase is start


def test_every_phase_is_reached_from_idle_and_leads_back() -> None:
    def reached_from(phase: Phase) -> set[Phase]:
        seen, ahead = set(), [phase]
        while ahead:
            for following in ALLOWED[ahead.pop()] - seen:
                seen.add(following)
                ahead.append(following)
        return seen

    assert all(reached_from(phase) == set(Phase) for phase in Phase)


# ------------------------------------------------------------------ one pass, without a reducer


class Calls:
    """The parts that a pass needs, and a record of its calls to them."""

    def __init__(self, sizes: Sequence[int] = (1, 1, 1), *, usage_tracker: type[UsageTracker] = UsageTracker):
        self.log: list[str] = []
        self.params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        for param in self.params:
            param.grad = torch.full_like(param, 4.0)
        specs = [ParamSpec(f"p{i}", p.numel(), p.dtype, p.device) for i, p in enumerate(self.params)]
        self.store = BucketStore(self.params, specs, Bucket, [0], [0])
        self.transport = FakeTransport(world_size=4)
        self.store.make_buckets(self.transport.allocate)
        self.reduce_strategy = AllReduceStrategy(self.transport, lambda: 4)
        self.usage_tracker = usage_tracker(self.params)
        self.events = EventStream()
        self.events.watch(lambda event: self.log.append(str(event)))

    def on_all_launched(self) -> None:
        self.log.append("all launched")

    def on_ready_twice(self, param: int) -> None:
        self.log.append(f"twice: {param}")

    def on_end(self, current: BackwardPass, backward: int) -> None:
        self.log.append("end")

    def backward_pass(self, *modes: Mode, first: int = 0) -> BackwardPass:
        """A pass for which the gradient of parameter `first` is the first to arrive, and has yet to be counted."""
        calls = (self.on_all_launched, self.on_ready_twice, self.on_end)
        current = BackwardPass(self.store, self.usage_tracker, modes, self.events, *calls)
        current.begin(first, self.reduce_strategy)
        current.mark_without_hook(self.usage_tracker.last_unused or [])
        return current

    def take(self, *words: str) -> list[str]:
        """Notes that begin with one of these words, since the last call."""
        log, self.log = [line for line in self.log if line.startswith(words)], []
        return log


def test_a_bucket_waits_for_all_of_its_pack_groups() -> None:
    calls = Calls((1, LARGE_BYTES, 1))
    calls.store = BucketStore(calls.params, calls.store.plan.params, Bucket, [UNBOUNDED], [UNBOUNDED])
    calls.store.make_buckets(calls.transport.allocate)
    current = calls.backward_pass()
    assert current.groups_left == [2]
    for param, left in ((1, 1), (0, 1), (2, 0)):
        assert current.reductions == []
        current.mark_ready(param)
        assert current.groups_left == [left]
    assert calls.take("bucket ready", "bucket launched") == ["bucket ready: 0", "bucket launched: 0"]


def test_a_rank_of_weight_zero_contributes_zeros_and_no_nan() -> None:
    calls = Calls()
    calls.reduce_strategy.divisor = lambda: math.inf
    calls.params[1].grad.fill_(math.nan)
    current = calls.backward_pass()
    for param in range(3):
        current.mark_ready(param)
    current.wait_and_unpack()
    assert [param.grad.tolist() for param in calls.params] == [[0.0]] * 3


def test_what_no_rank_has_used_stays_as_it_is() -> None:
    calls = Calls()
    current = calls.backward_pass()
    for param in range(3):
        current.mark_ready(param)
        calls.params[param].grad = torch.full((1,), 9.0)
    calls.usage_tracker.close = lambda: [False, True, False]
    current.wait_and_unpack()
    assert [param.grad.tolist() for param in calls.params] == [[4.0], [9.0], [4.0]]


class LeavesOut(UsageTracker):
    """Parameter 2 is unused, and its bucket is skipped."""

    def begin_pass(self) -> list[int]:
        self.last_unused = [2]
        return [1, 1, 0]

    def skipped_buckets(self, plan: BucketPlan) -> set[int]:
        return {bucket.index for bucket in plan.buckets if bucket.slots[0].param == 2}


def test_unused_parameters_are_ready_at_once_and_last_in_the_observed_order() -> None:
    calls = Calls(usage_tracker=LeavesOut)
    current = calls.backward_pass(first=1)
    assert calls.take("parameter ready") == ["parameter ready: 2"]
    for param in (1, 0):
        current.mark_ready(param)
    assert current.observed_order() == [1, 0, 2]
    assert current.reductions[0] is None, "skipped"
    calls.params[2].grad = kept = torch.full((1,), 9.0)
    current.wait_and_unpack()
    assert calls.params[2].grad is kept
    assert calls.transport.count("all_reduce") == 2


def test_abandoning_waits_for_launched_reductions_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def result(self) -> torch.Tensor:
            raise OSError("the peer is gone")

    calls = Calls()
    current = calls.backward_pass()
    current.mark_ready(2)
    current.mark_ready(1)
    current.reductions.insert(0, Failing())
    current.abandon()
    assert all(reduction.work._done for reduction in current.reductions[1:])
    assert "the peer is gone" in caplog.text
    assert calls.take("bucket unpacked") == []
