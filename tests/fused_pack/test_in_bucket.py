"""A reducer whose buckets are packed by the kernel, on the CPU, beside one whose are not: the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from minddp import packing
from minddp.fused_pack import FusedPack
from minddp.fused_pack.kernel import compiled
from tests.fakes import FakeDDP, FakeTransport
from tests.fused_pack.on_cpu import COMPILER, CuPyOnCpu
from tests.parity.compare import same_bits

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the kernel for the CPU")


class _Stream:
    cuda_stream = 5


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_training_is_the_same_to_the_bit(
    options: dict[str, bool], set_to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 33, bias=False), nn.LayerNorm(33))
    fused = copy.deepcopy(plain)
    cupy = CuPyOnCpu()
    ours = FakeDDP(plain, FakeTransport(world_size=3), **options)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: _Stream())

    def fused_pack_of(views: list[torch.Tensor], dtype: torch.dtype) -> FusedPack | None:
        return FusedPack(cupy, views, dtype) if len(views) > 1 else None

    monkeypatch.setattr(packing, "fused_pack_of", fused_pack_of)
    monkeypatch.setenv("MINDDP_FUSED_PACK", "1")
    theirs = FakeDDP(fused, FakeTransport(world_size=3), **options)
    for _ in range(4):
        x = torch.randn(6, 7)
        for ddp in (ours, theirs):
            ddp.module.zero_grad(set_to_none=set_to_none)
            ddp.step(x)
        for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
            assert same_bits(one.grad, other.grad)
    assert cupy.launches > 0 or (options.get("gradient_as_bucket_view") and not set_to_none)
    compiled.cache_clear()
