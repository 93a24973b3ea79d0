"""The callbacks of a mode, in each way that a backward can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minddp.core.mode import Mode
from minddp.modes.join import shadow_backward
from tests.fakes import FakeDDP, FakeTransport
from tests.logs import must_log
from tests.modules import Checkpointed, Heads, HidesItsOutput, Scales

X = torch.ones(1, 2)


def recorded(text: Callable[..., str]) -> Callable[..., None]:
    return lambda self, *args: self.log.append(text(*args))


class RecordsCalls(Mode):
    """Records its calls and their arguments."""

    def __init__(self) -> None:
        self.log: list[str] = []

    post_forward = recorded(lambda: "post_forward")
    backward_begins = recorded(lambda: "backward begins")
    shadow_begins = recorded(lambda: "shadow begins")
    first_gradient = recorded(lambda param: f"opened by {param}")
    before_pack = recorded(lambda params: f"before pack {list(params)}")
    before_launch = recorded(lambda bucket, contents: f"before launch {bucket.spec.index}")
    before_unpack = recorded(lambda: "before unpack")
    after_unpack = recorded(lambda bucket: f"after unpack {bucket.spec.index}")
    post_backward = recorded(lambda: "closed")

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


def test_backward_is_over_before_the_usage_of_parameters_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, recorder = with_recorder(Scales([0, 1]))
    usage_tracker = ddp.reducer.usage_tracker
    close = usage_tracker.close
    monkeypatch.setattr(usage_tracker, "close", lambda: recorder.log.append("usage") or close())
    ddp.step(X)
    assert recorder.take() == [*BEGIN, *PACKED, "before unpack", "usage", *END[1:]]


def test_each_callback_calls_all_modes_in_order() -> None:
    ddp, one = with_recorder(Scales([0, 1]))
    other = RecordsCalls()
    other.log = one.log
    ddp.reducer.modes.append(other)
    ddp.step(X)
    assert one.log == [line for line in [*BEGIN, *PACKED, *END] for _ in range(2)]


class TwoOutputs(nn.Module):
    """The second output is computed from the first, so a backward enters at both before it reaches a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = Scales([0, 1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.scales(x)
        return y, y * 2


def scales() -> Scales:
    return Scales([0, 1])


@pytest.mark.parametrize(
    ("make", "options", "loss", "log"),
    [
        (scales, {}, lambda ddp: ddp(X), [*BEGIN, *PACKED, *END] * 2),
        (scales, {}, lambda ddp: ddp(X, sync=False), []),
        (lambda: HidesItsOutput(scales()), {}, lambda ddp: ddp(X).tensor, [BEGIN[0], BEGIN[2], *PACKED, *END] * 2),
        (TwoOutputs, {}, lambda ddp: sum(ddp(X)), [*BEGIN, *PACKED, *END] * 2),
        (  # the first one of a static graph packs at its end, in the order of the parameters
            *(scales, {"static_graph": True}, lambda ddp: ddp(X)),
            [*BEGIN, PACKED[2], PACKED[0], PACKED[1], PACKED[3], *END, *BEGIN, *PACKED, *END],
        ),
    ],
    ids=["complete", "under no_sync", "not seen to begin", "at two outputs", "static"],
)
def test_two_backwards(
    make: Callable[[], nn.Module], options: dict[str, Any], loss: Callable[[FakeDDP], Any], log: list[str]
) -> None:
    ddp, recorder = with_recorder(make(), **options)
    for _ in range(2):
        loss(ddp).sum().backward()
    assert recorder.log == log


def test_a_backward_in_which_a_bucket_is_skipped() -> None:
    ddp, recorder = with_recorder(Heads(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    ddp(X)[0].sum().backward()
    assert recorder.take()[-6:] == ["before unpack", *[f"after unpack {b}" for b in range(4)], "closed"]


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
    ddp.fail(X)
    assert recorder.take() == [*BEGIN, *PACKED[:2]]
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
