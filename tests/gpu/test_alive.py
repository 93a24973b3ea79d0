"""The worlds come up. Where one does not, all tests that use it fail for that reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.ranks import WORLDS, GpuPool, collectives


@pytest.mark.parametrize("world", WORLDS)
def test_a_world_comes_up(world: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    size = WORLDS[world].size
    expected = [[size * (size + 1) / 2] * 5, [0.0, 0.0], [float(rank) for rank in range(size)]]
    assert gpu_ranks(world).run(collectives, timeout_s=100) == [expected] * size
