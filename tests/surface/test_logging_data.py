"""The logging data: the same as torch's where it can be, and of the iteration that it names."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.compat.logger import MOMENTS, SPANS, Logger
from minddp.core.events import EventKind
from minddp.platform import streams
from tests.fakes import FakeDDP
from tests.processes import python
from tests.ranks import on_ranks
from tests.surface.models import A_BYTE, Normed, TwoLayers, batch

TIMES = {*MOMENTS, *SPANS, *(f"avg_{name}" for name in SPANS)}
# Torch sets the first when a logger dies or sees the graph change, but for the first logger of a process only.
WITHOUT_COUNTERPART = {"can_set_static_graph"}


def logged(ddp: nn.Module) -> dict[str, Any]:
    return ddp._get_ddp_logging_data()


def run(ddp: nn.Module, rank: int, step: int, **kwargs: Any) -> None:
    ddp.zero_grad()
    ddp(batch(rank, step), **kwargs).sum().backward()


# ------------------------------------------------------------------ against torch


def first_logger_of_the_process_dies() -> None:
    """What torch logs of a graph that changes it logs once; with it comes the number of another iteration."""
    TorchDDP(TwoLayers())
    gc.collect()


def both(rank: int, options: dict[str, Any], uses: list[bool]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The data of torch's wrapper and of ours before the first and after each step; `uses` is for `TwoLayers`."""
    histories: list[list[dict[str, Any]]] = []
    first_logger_of_the_process_dies()
    for wrapper in (TorchDDP, minddp.DistributedDataParallel):
        ddp = wrapper(TwoLayers(), **options)
        histories.append([logged(ddp)])
        for step, use in enumerate(uses):
            run(ddp, rank, step, both=use)
            histories[-1].append(logged(ddp))
    return zip(*histories, strict=True)


def without_times(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in TIMES | WITHOUT_COUNTERPART}


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({}, [True] * 4),
        ({"bucket_cap_mb": A_BYTE, "gradient_as_bucket_view": True, "forward_sync_buffers": False}, [True] * 4),
        ({"find_unused_parameters": True}, [True, False, True, False]),
        (
            {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": A_BYTE},
            [False, False, False],
        ),
    ],
)
def test_torch_says_the_same(rank: int, options: dict[str, Any], uses: list[bool]) -> None:
    for theirs, ours in both(rank, options, uses):
        assert without_times(ours) == without_times(theirs)
        assert TIMES & ours.keys() == TIMES & theirs.keys()


@on_ranks(2)
def test_static_graph_as_torch_but_for_its_first_iteration(rank: int) -> None:
    """In it torch reduces every bucket and counts none."""
    for theirs, ours in both(rank, {"static_graph": True}, [False] * 4):
        if ours["iteration"] == 1:
            assert (theirs.pop("num_buckets_reduced", 0), ours.pop("num_buckets_reduced")) == (0, 1)
        assert without_times(ours) == without_times(theirs)
        assert "can_set_static_graph" not in ours


@on_ranks(2)
def test_the_environment_is_in_the_logging_data(rank: int) -> None:
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo", MASTER_PORT="12345"):
        ddps = TorchDDP(TwoLayers()), minddp.DistributedDataParallel(TwoLayers())
        theirs, ours = (without_times(logged(ddp)) for ddp in ddps)
        assert ours == theirs
        assert (ours["gloo_socket_ifname"], ours["master_port"]) == ("lo", "12345")


# ------------------------------------------------------------------ sampling


@on_ranks(2)
def test_ten_iterations_are_sampled_and_then_some(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    ddp._set_ddp_runtime_logging_sample_rate(4)
    named, watched = [], []
    for step in range(21):
        run(ddp, rank, step)
        named.append(logged(ddp)["iteration"])
        watched += [step + 1] if ddp._reducer.events.sink is not None else []
    assert named == [*range(11), 10, 12, 12, 12, 12, 16, 16, 16, 16, 20]  # logged when the next one begins
    assert watched == [*range(1, 11), 12, 16, 20]


@on_ranks(2)
def test_only_forwards_that_train_count(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    with torch.no_grad():
        ddp(batch(rank))
    with ddp.no_sync():
        run(ddp, rank, 0)
    run(ddp, rank, 1)
    ddp(batch(rank))  # a forward without backward
    ddp(batch(rank))
    data = logged(ddp)
    assert data["iteration"] == 2
    assert data["forward_compute_time"] > 0
    assert data["backward_compute_time"] == data["backward_comm_time"] == 0  # of the one without backward
    assert data["avg_backward_compute_time"] > 0
    assert data["num_buckets_reduced"] == 0


# ------------------------------------------------------------------ one sampled iteration, event by event

STEP = (
    EventKind.FORWARD_BEGIN,
    EventKind.FORWARD_END,
    EventKind.BACKWARD_BEGIN,
    EventKind.PARAM_READY,
    EventKind.BUCKET_LAUNCHED,
    EventKind.GRADIENTS_COMPLETE,
    EventKind.BACKWARD_END,
)


class DeviceEvent:
    """Stands in for a device's event: the device is a millisecond behind with each one."""

    count = 0

    def __init__(self, _device: torch.device):
        DeviceEvent.count += 1
        self.ms = DeviceEvent.count * 1.0
        self.waited_for = False

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert end.waited_for
        return end.ms - self.ms


def observed(monkeypatch: pytest.MonkeyPatch, kinds: tuple[EventKind, ...], device: str = "cpu") -> dict[str, Any]:
    """What is logged of these events. Ten nanoseconds pass with each reading of the clock."""
    clock = itertools.count(1000, 10)
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    monkeypatch.setattr(streams, "timed_event", DeviceEvent)
    fake = FakeDDP(nn.Linear(2, 2))
    options = {"device_ids": None, "output_device": None, "forward_sync_buffers": True, "static_graph": False}
    options |= {"find_unused_parameters": False, "gradient_as_bucket_view": False, "bucket_bytes_cap": 1}
    ddp = mock.Mock(
        module=fake.module,
        process_group=dist.ProcessGroup(0, 1),
        is_multi_device_module=False,
        device=torch.device(device),
        _reducer=fake.reducer,
        **options,
    )
    logger = Logger(ddp)
    logger.begin_iteration()
    for kind in kinds:
        fake.reducer.events.emit(kind, 0)
    logger.set_runtime_stats_and_log()
    data = logger._get_ddp_logging_data()
    return {**data.strs_map, **data.ints_map}


def test_spans_lie_between_the_first_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    data = observed(monkeypatch, (*STEP, EventKind.FORWARD_BEGIN, EventKind.FORWARD_END))
    spans = {"forward_compute_time": 10, "backward_compute_time": 20, "backward_comm_time": 20}
    assert data.items() >= (spans | {"backward_compute_comm_overlap_time": 10, "num_buckets_reduced": 1}).items()
    assert data["prev_iteration_grad_ready_order_indices"] == "0"
    assert data["backward_comm_time_end"] - data["backward_comm_time_start"] == 20


def test_communication_after_the_gradients_overlaps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = (*STEP[:2], STEP[5], EventKind.PARAM_READY, EventKind.BUCKET_LAUNCHED, EventKind.BACKWARD_END)
    data = observed(monkeypatch, recorded)
    assert data["backward_compute_comm_overlap_time"] == 0
    assert "prev_iteration_grad_ready_order_indices" not in data


def test_an_accelerator_times_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    data = observed(monkeypatch, STEP, device="cuda")
    assert (data["forward_compute_time"], data["backward_compute_time"]) == (1_000_000, 2_000_000)
    assert data["backward_compute_time_start"] - data["forward_compute_time_start"] == 10  # the host's clock


# ------------------------------------------------------------------ whether the graph is static


@on_ranks(2)
def test_a_graph_that_changes_is_not_static(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers(), find_unused_parameters=True)
    ddp._set_ddp_runtime_logging_sample_rate(1000)
    seen = []
    for step, use in enumerate([False] * 13 + [True, False]):
        run(ddp, rank, step, both=use)
        seen.append((ddp.reducer._ddp_graph_static(), logged(ddp).get("can_set_static_graph")))
    assert seen[0] == (True, None)  # one iteration proves nothing
    assert seen[1:13] == [(True, 1)] * 12
    assert seen[13:] == [(False, 0)] * 2


# ------------------------------------------------------------------ set by others


@on_ranks(2)
def test_join_and_hooks_are_in_the_logging_data(rank: int) -> None:
    joined = minddp.DistributedDataParallel(Normed())
    with joined.join():
        for step in range(2 + rank):
            run(joined, rank, step)
    hooked = minddp.DistributedDataParallel(TwoLayers())
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert logged(joined)["join_uneven_inputs"] == 1
    assert logged(hooked)["comm_hook"] == "BuiltinCommHookType.ALLREDUCE"


DETAIL = """
import sys, torch, torch.distributed as dist, minddp
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
ddp = minddp.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(2):
    ddp(torch.ones(1, 2)).sum().backward()
data = ddp._get_ddp_logging_data()
assert (data["torch_distributed_debug"], data["gloo_num_threads"]) == ("DETAIL", 2), data
"""


def test_a_group_may_be_wrapped_for_debugging(tmp_path: Path) -> None:
    """Torch 2.13's own logger takes the wrapper for gloo itself, and the process ends with a segmentation fault."""
    python("-c", DETAIL, str(tmp_path / "store"), TORCH_DISTRIBUTED_DEBUG="DETAIL")
