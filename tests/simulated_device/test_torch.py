"""Torch's wrapper by the same scripts, as a control.

The dispatch mode sees what torch's reducer does in C++: packing, all-reduces, copying back. It does not see the
wait for the buckets' futures at the end of backward, which is C++ on both sides. So that one is added here, where
the reducer makes it: with it there is no race, without it there are. Left out are modes in which the reducer reads
marks of use, which it has on the host and which look from here as if they were on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.ranks import RankPool
from tests.simulated_device.installed import simulated_device
from tests.simulated_device.modes import MODES, Training

NAMES = ("default", "views, resident", "fp16 hook", "buffers", "no_sync")


def run_torch(rank: int, name: str, waits: bool) -> tuple[list[str], list[str]]:
    """What the device notices of torch's wrapper; `waits`: with the wait that it cannot see."""
    mode = MODES[name]
    with simulated_device() as device:
        training = Training(mode, "", rank, device, TorchDDP)

        def wait_for_all() -> None:
            for stream in device.streams:
                device.current.wait_stream(stream)

        def before_the_reducers_end(_gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(wait_for_all)

        if waits:
            training.module.register_forward_hook(
                lambda _module, _inputs, output: output.register_hook(before_the_reducers_end) and None
            )
        for _ in range(mode.steps):
            mode.step(training)
            training.over()
        torch.get_device_module(torch.device("cpu")).synchronize()
        del training
    return device.errors, device.waits


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_torchs_wrapper_has_no_race(name: str, ranks: Callable[[int], RankPool]) -> None:
    for errors, waits in ranks(2).run(run_torch, name, True):
        assert errors == []
        assert waits == []


def test_without_its_wait_it_has(ranks: Callable[[int], RankPool]) -> None:
    for errors, _waits in ranks(2).run(run_torch, "default", False):
        assert any("allreduce" in error and "aten.copy_" in error for error in errors), errors
