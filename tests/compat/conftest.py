"""Two ranks of their own for the frameworks, which import much and set environment variables and seeds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.kill()
