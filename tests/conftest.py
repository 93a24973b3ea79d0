"""Fixtures: pools of real ranks that live for the whole run. And what happens to options that torch lacks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.ranks import RankFailure, RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the session's pool of n gloo ranks."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool_of
    for pool in pools.values():
        pool.kill()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Where torch's class has not learned an option yet, there is nothing to compare minddp's with."""
    try:
        return (yield)
    except RankFailure as failure:
        unknown = re.search(
            r"DistributedDataParallel\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(failure)
        )
        if unknown is not None and unknown[1] not in inspect.signature(TorchDDP).parameters:
            pytest.skip(f"the installed torch has no `{unknown[1]}`")
        raise
