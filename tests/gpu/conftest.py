"""Pools of ranks on GPUs. Without a GPU only `test_card.py` is collected, which says so in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu.ranks import REHEARSAL, WORLDS, GpuPool

collect_ignore_glob = [] if REHEARSAL or torch.cuda.is_available() else ["test_[!c]*.py", "test_compile.py"]


@pytest.fixture
def only_on_a_card() -> None:
    if REHEARSAL:
        pytest.skip("cannot be rehearsed without a GPU")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[str], GpuPool]]:
    """`gpu_ranks("nccl2")` is the session's pool of that world."""
    pools: dict[str, GpuPool] = {}

    def pool_of(name: str) -> GpuPool:
        if name not in pools:
            pools[name] = GpuPool(WORLDS[name])
        return pools[name]

    yield pool_of
    for pool in pools.values():
        pool.kill()
