"""The card and the packages beside it."""

from __future__ import annotations

import pytest
import torch

from minddp.transport.nccl.nccl_transport import import_cupy


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
