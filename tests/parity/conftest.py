"""Pools of ranks for this folder: as the others, but with more time for a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parity.search import new_pool
from tests.ranks import RankPool


@pytest.fixture(scope="package")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """`pools(n)` is the folder's pool of n gloo ranks."""
    started: dict[int, RankPool] = {}
    yield lambda world_size: started.setdefault(world_size, new_pool(world_size))
    for pool in started.values():
        pool.kill()
