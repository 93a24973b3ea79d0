"""The callbacks of a mode, in each way that a backward can end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from minddp.core.bucket import GradientBucket
from minddp.core.mode import Mode
from minddp.modes.join import shadow_backward
from tests.fakes import FakeDDP, FakeTransport
from tests.logs import must_log
from tests.modules import Checkpointed, Heads, HidesItsOutput, Scales

X = torch.ones(1, 2)


class RecordsCalls(Mode):
    """Records its calls and their arguments."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def post_forward(self) -> None:
        self.log.append("post_forward")

    def backward_begins(self) -> None:
        self.log.append("backward begins")

    def shadow_begins(self) -> None:
        self.log.append("shadow begins")

    def first_gradient(self, param: int) -> None:
        self.log.append(f"opened by {param}")

    def before_pack(self, params: Sequence[int]) -> None:
        self.log.append(f"before pack {list(params)}")

    def before_launch(self, bucket: GradientBucket, contents: torch.Tensor) -> None:
        self.log.append(f"before launch {bucket.spec.index}")

    def before_unpack(self) -> None:
        self.log.append("before unpack")

    def after_unpack(self, bucket: GradientBucket) -> None:
        self.log.append(f"after unpack {bucket.spec.index}")

    def post_backward(self) -> None:
        self.log.append("closed")

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log


def with_recorder(module: nn.Module, **options: Any) -> tuple[FakeDDP, RecordsCalls]:
    ddp, recorder = FakeDDP(module, FakeTransport(), bucket_cap_mb_list=[0], **options), RecordsCalls()
    ddp.reducer.modes.append(recorder)
    return ddp, recorder


BEGIN = ["post_forward", "backward begins", "opened by 1"]
PACKS_RIGHT = ["before pack [2]", "before pack [3]"]
PACKED = ["before pack [1]", "before launch 0", "before pack [0]", "before launch 1"]
END = ["before unpack", "after unpack 0", "after unpack 1", "closed"]


def test_the_tests_cover_every_callback_of_a_mode() -> None:
    callbacks = {name for name, member in vars(Mode).items() if callable(member) and not name.startswith("_")}
    assert callbacks == vars(RecordsCalls).keys() & callbacks


def test_a_mode_may_leave_callbacks_out() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    ddp.reducer.modes.append(Mode())
    ddp.step(X)
    assert ddp.transport.count("all_reduce") == 1


def test_backward_is_over_before_the_usage_of_parameters_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    usage_tracker = ddp.reducer.usage_tracker
    close = usage_tracker.close
    monkeypatch.setattr(usage_tracker, "close", lambda: recorder.log.append("usage") or close())
    ddp.step(X)
    assert recorder.take() == [*BEGIN, *PACKED, "before unpack", "usage", *END[1:]]


def test_a_complete_backward() -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    for _ in range(2):
        ddp.step(X)
        assert recorder.take() == [*BEGIN, *PACKED, *END]


def test_each_callback_calls_all_modes_in_order() -> None:
    ddp, one = with_recorder(Scales([0, 1]))
    other = RecordsCalls()
    other.log = one.log
    ddp.reducer.modes.append(other)
    ddp.step(X)
    assert one.log == [line for line in [*BEGIN, *PACKED, *END] for _ in range(2)]


def test_under_no_sync_there_is_none() -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    ddp(X, sync=False).sum().backward()
    assert recorder.take() == []


def test_a_backward_whose_beginning_is_not_seen() -> None:
    ddp, recorder = with_recorder(HidesItsOutput(Scales([0, 1])))
    ddp(X).tensor.sum().backward()
    assert recorder.take() == ["post_forward", "opened by 1", *PACKED, *END]


class TwoOutputs(nn.Module):
    """The second output is computed from the first, so a backward enters at both before it reaches a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = Scales([0, 1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.scales(x)
        return y, y * 2


def test_a_backward_that_enters_at_two_outputs_begins_once() -> None:
    ddp, recorder = with_recorder(TwoOutputs())
    one, other = ddp(X)
    (one + other).sum().backward()
    assert recorder.take() == [*BEGIN, *PACKED, *END]


def test_a_backward_that_reaches_no_parameter() -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    x = X.clone().requires_grad_()
    torch.autograd.grad(ddp(x).sum(), x)
    assert recorder.take() == BEGIN[:2]
    ddp.step(X)
    assert recorder.take() == [*BEGIN, *PACKED, *END]


def test_a_backward_that_leaves_parameters_out_and_one_that_brings_them() -> None:
    ddp, recorder = with_recorder(Heads())  # left 0, 1; right 2, 3
    left, right = ddp(X)
    with must_log("has produced no gradient"):
        left.sum().backward()
    first = recorder.take()
    assert first[:3] == ["post_forward", "backward begins", first[2]]
    assert sorted(first[3:]) == ["before pack [0]", "before pack [1]"]
    right.sum().backward()
    second = recorder.take()
    assert sorted(second[:6]) == [*[f"before launch {bucket}" for bucket in range(4)], *PACKS_RIGHT]
    assert second[6:] == ["before unpack", *[f"after unpack {bucket}" for bucket in range(4)], "closed"]


def test_a_backward_that_its_caller_finalizes() -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    ddp(X, finalize_at_end=False).sum().backward()
    assert recorder.take() == [*BEGIN, *PACKED]
    ddp.reducer.finish()
    assert recorder.take() == END


def test_a_backward_that_an_exception_ends() -> None:
    ddp, recorder = with_recorder(Scales([0, 1], explode_after=0))
    ddp.module.explosive.arm()
    with pytest.raises(KeyError):
        ddp.step(X)
    assert recorder.take() == [*BEGIN, *PACKED[:2]]
    ddp.module.explosive.arm(False)
    ddp.step(X)
    assert recorder.take() == ["closed", *BEGIN, *PACKED, *END]


def test_a_backward_after_which_the_ranks_change() -> None:
    ddp, recorder = with_recorder(Heads())
    with must_log("has produced no gradient"):
        ddp(X)[0].sum().backward()
    recorder.take()
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    assert recorder.take() == ["closed"]
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    assert recorder.take() == []


def test_a_backward_in_which_a_bucket_is_skipped() -> None:
    ddp, recorder = with_recorder(Heads(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    ddp(X)[0].sum().backward()
    assert recorder.take()[-6:] == ["before unpack", *[f"after unpack {b}" for b in range(4)], "closed"]


@pytest.fixture
def static() -> tuple[FakeDDP, RecordsCalls]:
    return with_recorder(Scales([0, 1]), static_graph=True)


def test_the_first_backward_of_a_static_graph(static: tuple[FakeDDP, RecordsCalls]) -> None:
    """The first one of a static graph packs at its end, in the order of the parameters."""
    ddp, recorder = static
    ddp.step(X)
    assert recorder.take() == [*BEGIN, PACKED[2], PACKED[0], PACKED[1], PACKED[3], *END]
    ddp.step(X)
    assert recorder.take() == [*BEGIN, *PACKED, *END]


def test_a_nested_backward_does_not_begin_again() -> None:
    ddp, recorder = with_recorder(Checkpointed())
    ddp.step(X)
    log = recorder.take()
    assert log[:2] == ["post_forward", "backward begins"]
    assert [line.split()[0] for line in log[2:]] == ["opened", *["before"] * 9, *["after"] * 4, "closed"]


def test_the_callbacks_on_a_rank_without_inputs() -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    shadow_backward(ddp.reducer)
    assert recorder.take() == ["shadow begins", "before launch 0", "before launch 1"]
    assert ddp.transport.count("all_reduce") == 2
