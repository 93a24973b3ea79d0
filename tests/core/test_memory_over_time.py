"""Bytes in use in the phases of four steps, beside torch's class: buckets that exist from the start, and lazy ones.

They are read from the C library's `malloc`, which serves torch's CPU allocator. The profiler of torch would not do:
it misses what is released by a thread that it does not follow.
"""

from __future__ import annotations

import ctypes
import gc
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp

STEPS = 4
LAYERS = 4
WIDTH = 1024  # of layers that are large beside what other threads release meanwhile
LAYER_BYTES = 4 * WIDTH * WIDTH


#: The members of `struct mallinfo2`.
COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in COUNTS)


MALLINFO2 = getattr(ctypes.CDLL(None), "mallinfo2", None)


pytestmark = pytest.mark.skipif(MALLINFO2 is None, reason="the C library does not count bytes in use")


def bytes_in_use() -> int:
    MALLINFO2.restype = _Mallinfo2
    counts = MALLINFO2()
    return int(counts.uordblks + counts.hblkhd)


def over_time(rank: int, make: Any, options: dict[str, Any]) -> dict[str, float]:
    """Memory in use after each phase beyond the module's, as a multiple of a layer's gradient.

    An all-reduce of gloo that is under way takes a bucket more, so the barrier waits for those that were begun.
    The least over all steps after the rebuild: a thread of gloo may release what it has sent somewhat later.
    """
    least: dict[str, float] = {}

    def see(phase: str) -> None:
        dist.barrier()
        layers = (bytes_in_use() - base) / LAYER_BYTES
        least[phase] = min(layers, least.get(phase, layers))

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for index, layer in enumerate(module):
        layer.register_full_backward_pre_hook(lambda *_, index=index: see(f"backward of layer {index}"))
    x = torch.randn(1, WIDTH, requires_grad=True)
    gc.collect()
    base = bytes_in_use()
    ddp = make(module, bucket_cap_mb=LAYER_BYTES / 2**20, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 1:
            least.clear()
        output = ddp(x)
        see("forward")
        output.sum().backward()
        see("backward")
        optimizer.step()
        see("optimizer")
        optimizer.zero_grad()
        see("zero_grad")
    return least


def _ours(module: nn.Module, **options: Any) -> nn.Module:
    """Without what looks for drift, which copies a part of the parameters for a thread of its own."""
    return minddp.DistributedDataParallel(module, transport="process_group", on_drift=None, **options)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_lazy_buckets_take_memory_during_backward_only(ranks: Any, views: bool) -> None:
    options = {"gradient_as_bucket_view": views}
    eager, lazy = (
        ranks(2).run(over_time, _ours, {**options, "lazy_bucket_allocation": lazy})[0] for lazy in (False, True)
    )
    for phase in ("forward", "zero_grad"):
        assert eager[phase] > LAYERS - 0.5
        assert lazy[phase] < 0.5
    assert lazy["backward of layer 2"] < LAYERS - 0.5, "one bucket after the other"
    assert LAYERS - 0.5 < lazy["backward"] < LAYERS + 0.5, "the gradients"


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_no_phase_takes_more_than_with_torch(ranks: Any, views: bool, lazy: bool) -> None:
    if lazy and "lazy_bucket_allocation" not in signature(TorchDDP).parameters:
        pytest.skip("later torch has it")
    options = {"gradient_as_bucket_view": views} | ({"lazy_bucket_allocation": True} if lazy else {})
    theirs, ours = (ranks(2).run(over_time, make, options)[0] for make in (TorchDDP, _ours))
    assert ours.keys() == theirs.keys()
    assert {phase: (ours[phase], theirs[phase]) for phase in ours if ours[phase] > theirs[phase] + 0.9} == {}
