"""The card and the packages beside it; the worlds come up. Where one does not, all tests that use it fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minddp.transport.nccl.nccl_transport import import_cupy
from tests.gpu.ranks import REHEARSAL, WORLDS, GpuPool, collectives


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no NVIDIA GPU: the tests in tests/gpu are left out; see docs/gpu.md"
)
def test_a_card_and_a_cupy_for_it() -> None:
    cupy = import_cupy()
    from cupy.cuda import nccl

    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()} of them; torch")
    print(f"{torch.__version__} for CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}; CuPy")
    print(f"{cupy.__version__}, which calls NCCL {nccl.get_version()}")
    assert nccl.available
    assert cupy.arange(5, dtype=cupy.float32).sum().item() == 10


@pytest.mark.skipif(not (REHEARSAL or torch.cuda.is_available()), reason="no NVIDIA GPU")
@pytest.mark.parametrize("world", WORLDS)
def test_a_world_comes_up(world: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    size = WORLDS[world].size
    expected = [[size * (size + 1) / 2] * 5, [0.0, 0.0], [float(rank) for rank in range(size)]]
    assert gpu_ranks(world).run(collectives, timeout_s=100) == [expected] * size
