"""Two ranks of their own, to compare with the jobs that are launched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.kill()
