"""The wheel's tests of DDP on ranks of one process group, as classes that unittest can run.

Only ever imported in a stage, after the class under test has been put in place: importing the wheel's module
imports DDP, and reads the environment variables BACKEND and WORLD_SIZE.
"""

from __future__ import annotations

import inspect

from torch.testing._internal.distributed import distributed_test as wheel

# Convolutions over images of 1000 x 1000 keep a CPU core busy for minutes.
_uneven = inspect.unwrap(wheel.DistributedTest._DistTestBase.test_ddp_uneven_inputs)
_uneven.__code__ = _uneven.__code__.replace(
    co_consts=tuple(64 if constant == 1000 else constant for constant in _uneven.__code__.co_consts)
)


class TestDistBackendWithSpawn(wheel.TestDistBackend, wheel.DistributedTest._DistTestBase):  # type: ignore[misc]
    """PyTorch's name for them. Each test starts its own ranks."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
