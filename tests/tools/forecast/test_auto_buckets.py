"""Tuning on real ranks: one plan for all, right gradients before and after, and no way to ask for nonsense."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.platform import streams
from minddp.tools.forecast.auto_buckets import OBSERVED_STEPS, STEPS, WARM_UP_STEPS, AutoBuckets, Tuning, tune
from minddp.tools.forecast.gradient_clock import DeviceClock
from minddp.tools.forecast.link import measure_link
from minddp.tools.forecast.step_model import predicted_s
from tests.fakes import FakeDDP, FakeTransport
from tests.ranks import of_all_ranks, on_ranks
from tests.tools.forecast.made_up import STEP_MS, FakeDevice


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


@on_ranks(2)
def test_ranks_come_to_one_plan_and_gradients_stay_right(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(layers(), bucket_cap_mb="auto")
    alone = layers()
    for turn in range(STEPS):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * turn + rank))
        for model in (ddp, alone):
            model.zero_grad()
            model(x).square().mean().backward()
        for ours, own in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            mean = own.grad / 2
            dist.all_reduce(mean)
            assert torch.allclose(ours.grad, mean), f"in step {turn}"
    tuning = ddp.tuning
    assert str(ddp.plan) == str(tuning.plan if tuning.is_kept else tuning.before)
    first, second = of_all_ranks((str(ddp.plan), str(tuning.plan), tuning.is_kept, tuning.measured_s, tuning.link))
    assert first == second
    assert str(tuning.plan) == str(tuning.before) or tuning.measured_s > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("bucket_cap_mb_list", [1, 2]), ("first_bucket_cap_mb", 1), ("find_unused_parameters", True)],
)
@on_ranks(2)
def test_options_that_decide_the_plan_exclude_it(rank: int, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'`bucket_cap_mb="auto"`.*{name}'):
        minddp.DistributedDataParallel(layers(), bucket_cap_mb="auto", **{name: value})


@on_ranks(2)
def test_a_copy_tunes_its_own_buckets(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(layers(), bucket_cap_mb="auto")
    torch.save(ddp, memory := io.BytesIO())
    memory.seek(0)
    for model in (copy.deepcopy(ddp), torch.load(memory, weights_only=False)):
        model(torch.randn(2, 64)).sum().backward()
        assert model.tuning is None


# ------------------------------------------------------------------ by the clock of a device


class TunedDDP(FakeDDP):
    """Tunes its buckets by this clock."""

    def __init__(self, clock: DeviceClock, **options: Any):
        super().__init__(layers(), **options)
        self.tuner = AutoBuckets()
        self.tuner._steps = tune(self.reducer, clock)

    def prepare(self) -> None:
        """As the wrapper does it, before the module runs."""
        self.reducer.ensure_finished()
        self.reducer.rebuild_if_due()
        self.tuner.before_module(SimpleNamespace(_reducer=self.reducer), (), {})

    def backward(self) -> None:
        output = self.module(torch.ones(4, 64))
        self.reducer.prepare_for_backward(output)
        output.square().mean().backward()

    def tuned(self) -> Tuning:
        while self.tuner.tuning is None:
            self.prepare()
            self.backward()
        return self.tuner.tuning


def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeDevice, TunedDDP]:
    device = FakeDevice.installed(monkeypatch)
    return device, TunedDDP(DeviceClock(torch.device("cuda", 0)))


def test_the_host_waits_for_a_device_between_steps_and_twice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ddp = _on_a_device(monkeypatch)
    waited_before = []  # forwards that began with a wait
    for turn in range(STEPS + 5):
        before, recorded = device.waits, device.recorded
        ddp.prepare()
        if device.waits > before:
            waited_before.append(turn)
            before = device.waits
        ddp.backward()
        assert device.waits == before, f"step {turn} waited for the device"
        assert turn < STEPS or device.recorded == recorded, "nothing is recorded any more"
    observed = WARM_UP_STEPS + OBSERVED_STEPS
    assert waited_before == [1 + observed, 1 + 2 * observed]  # the first step shows the order
    # 16 parameters, each ready one moment of the made-up device after the other, then two more until the end
    assert ddp.tuner.tuning.before_s == pytest.approx(18 * STEP_MS / 1e3)
    seen = ddp.tuner.tuning.seen
    assert list(seen.ready_s.values()) == pytest.approx([(16 - param) * STEP_MS / 1e3 for param in range(16)])
    assert seen.computed_s == seen.gradients_complete_s, "a device is taken to compute whenever it can"


class OnASharedCore(DeviceClock):
    """Has computed for a share of the time only."""

    def __init__(self, share: float):
        super().__init__(torch.device("cuda", 0))
        self._share = share

    def computed_s(self, first: Any, last: Any) -> float:
        return self._share * self.seconds(first, last)


@pytest.mark.parametrize(("share", "buckets"), [(1.0, 5), (0.25, 1)])
def test_the_share_that_messages_take_decides_the_number_of_buckets(
    monkeypatch: pytest.MonkeyPatch, share: float, buckets: int
) -> None:
    """Where backward does not run during messages, few are better. Steps are the same otherwise."""
    FakeDevice.installed(monkeypatch)
    tuning = TunedDDP(OnASharedCore(share), bucket_cap_mb=0.04).tuned()
    assert len(tuning.before.buckets) > 1
    assert tuning.seen.computed_s == pytest.approx(share * tuning.seen.gradients_complete_s)
    before_s = predicted_s(tuning.before, tuning.link, tuning.seen.ready_s, tuning.seen.computed_s)
    assert before_s == pytest.approx(tuning.before_s)
    assert (tuning.link.taken > 0) == (share < 1)
    assert len(tuning.plan.buckets) == buckets


def test_a_plan_stays_if_none_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket is proposed, and there is one: nothing is adopted, and nothing more is observed."""
    FakeDevice.installed(monkeypatch)
    ddp = TunedDDP(OnASharedCore(0.25))
    tuning = ddp.tuned()
    assert tuning.plan is tuning.before is ddp.reducer.store.plan
    assert tuning.measured_s is None


def test_messages_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All take the same there, whatever their size."""
    device, _ = _on_a_device(monkeypatch)
    link = measure_link(FakeTransport(), torch.device("cpu"), DeviceClock(torch.device("cuda", 0)))
    assert link.seconds(4096) == pytest.approx(STEP_MS / 1e3)
    assert device.recorded == 30  # around five all-reduces of each size


def test_a_capture_comes_after_it_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ddp = _on_a_device(monkeypatch)
    monkeypatch.setattr(streams, "is_capturing", lambda _device: device.is_capturing)
    device.is_capturing = True
    with pytest.raises(RuntimeError, match=r"observes steps.*Take 26 steps before"):
        ddp.prepare()
    device.is_capturing = False
    for _ in range(26):
        ddp.prepare()
        ddp.backward()
    device.is_capturing = True
    ddp.prepare()
