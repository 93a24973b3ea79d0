"""Fixtures: pools of real ranks that live for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the session's pool of n gloo ranks."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool_of
    for pool in pools.values():
        pool.kill()
