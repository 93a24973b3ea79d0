"""Pools of ranks on GPUs. Without a GPU only `test_card.py` is collected, which says so in one line.

A world that does not come up is not waited for again: each test that needs it fails at once, with the reason. Else
one world that hangs would take the time of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu.ranks import REHEARSAL, WORLDS, GpuPool, collectives
from tests.ranks import RankFailure

COMES_UP_WITHIN_S = 60

collect_ignore_glob = [] if REHEARSAL or torch.cuda.is_available() else ["test_[!c]*.py", "test_compile.py"]


@pytest.fixture
def only_on_a_card() -> None:
    if REHEARSAL:
        pytest.skip("cannot be rehearsed without a GPU")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[str], GpuPool]]:
    """`gpu_ranks("nccl2")` is the session's pool of that world."""
    pools: dict[str, GpuPool] = {}
    down: dict[str, str] = {}

    def pool_of(name: str) -> GpuPool:
        if name not in pools and name not in down:
            pool = GpuPool(WORLDS[name])
            try:
                pool.run(collectives, timeout_s=COMES_UP_WITHIN_S)
                pools[name] = pool
            except RankFailure as failure:
                down[name] = str(failure)
        if name in down:
            pytest.fail(f"the world {name} does not come up: {down[name]}", pytrace=False)
        return pools[name]

    yield pool_of
    for pool in pools.values():
        pool.kill()
