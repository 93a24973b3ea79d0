"""The wheel's tests of DDP on ranks of one process group, as classes that unittest can run.

Only ever imported in a stage, after the class under test has been put in place: importing the wheel's module
imports DDP, and reads the environment variables BACKEND and WORLD_SIZE.
"""

from __future__ import annotations

from torch.testing._internal.distributed import distributed_test as wheel


class TestDistBackendWithSpawn(wheel.TestDistBackend, wheel.DistributedTest._DistTestBase):  # type: ignore[misc]
    """PyTorch's name for them. Each test starts its own ranks."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
