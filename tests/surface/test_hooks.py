"""Hooks that torch's wrapper brings along or registers itself: the same bits as with torch's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

import minddp
from tests.ranks import on_ranks
from tests.surface.models import A_BYTE, Normed, TwoLayers, batch

WRAPPERS = (TorchDDP, minddp.DistributedDataParallel)


def grads(ddp: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in ddp.parameters()]


def equal(theirs: list[Any], ours: list[Any]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


# ------------------------------------------------------------------ built-in communication hooks


@on_ranks(3)
@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": A_BYTE}])
def test_builtin_hooks_have_torchs_bits(rank: int, kind: str, options: dict[str, Any]) -> None:
    """Three ranks: a division and a multiplication by the inverse differ in bits."""
    histories = []
    for wrapper in WRAPPERS:
        ddp = wrapper(TwoLayers(), **options)
        ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        histories.append([])
        for step in range(3):
            ddp.zero_grad(set_to_none=step == 1)
            ddp(batch(rank, step)).sum().backward()
            histories[-1] += grads(ddp)
    assert equal(*histories)


@on_ranks(2)
def test_one_hook_only_and_only_known_ones(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(TypeError, match=r"BuiltinCommHookType\.FP16_COMPRESS"):
        ddp._register_builtin_comm_hook("ALLREDUCE")


@on_ranks(2)
def test_a_builtin_hook_is_refused_where_any_hook_is(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers(), logical_ranks=2)
    with pytest.raises(RuntimeError, match="`logical_ranks` exclude each other"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


@on_ranks(2)
def test_an_optimizer_that_cannot_be_fused_is_refused(rank: int) -> None:
    with pytest.raises((ValueError, RuntimeError), match="LBFGS"):
        minddp.DistributedDataParallel(TwoLayers())._register_fused_optim(torch.optim.LBFGS, 0.1)


# ------------------------------------------------------------------ buffers


@on_ranks(2)
@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_can_be_asked_for(rank: int, location: str) -> None:
    where, state = _BufferCommHookLocation[location], object()
    ddp = minddp.DistributedDataParallel(Normed())
    ddp._register_buffer_comm_hook(state, equal, where)
    assert ddp.buffer_hook == _BufferCommHook(equal, state, where)


@on_ranks(2)
def test_no_buffer_hook(rank: int) -> None:
    for wrapper in WRAPPERS:
        ddp = wrapper(Normed())
        assert not hasattr(ddp, "buffer_hook")
        with pytest.raises(AssertionError, match="must be callable"):
            ddp._register_buffer_comm_hook(None, "sum")


# ------------------------------------------------------------------ lifetime


@on_ranks(2)
def test_a_wrapper_is_freed_with_its_last_reference(rank: int) -> None:
    """Without the collector: hooks of a freed wrapper must be removed before the module is wrapped again."""
    gc.disable()
    try:
        module = TwoLayers()
        ddp = minddp.DistributedDataParallel(module)
        for step in range(2):
            ddp(batch(rank, step)).sum().backward()
        observers = [weakref.ref(part) for part in (ddp, ddp._reducer, ddp.reducer, ddp.logger)]
        del ddp
        assert [observer() for observer in observers] == [None] * 4
    finally:
        gc.enable()
