"""The wheel's tests of DDP under RPC and distributed autograd, over the TensorPipe agent.

Only ever imported in a stage, as `wheel_ddp`.
"""

from __future__ import annotations

import time
from typing import Any

from torch import distributed as dist
from torch.distributed import rpc
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as wheel
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests


class DdpUnderDistAutogradTest(wheel.DdpUnderDistAutogradTest):  # type: ignore[misc]
    """Its master calls the trainers as soon as its own group is initialised; a trainer's may not be yet."""

    def do_test_on_master(self, *arguments: Any) -> None:
        for rank in range(self.world_size):
            rpc.rpc_sync(f"worker{rank}", _wait_for_default_group)
        super().do_test_on_master(*arguments)


def _wait_for_default_group(limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not dist.is_initialized():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No default process group within {limit_s:.0f} s.")
        time.sleep(0.01)


_SCENARIOS = [wheel.DdpComparisonTest, DdpUnderDistAutogradTest, wheel.CudaDdpComparisonTest]

globals().update(generate_tests("TensorPipe", TensorPipeRpcAgentTestFixture, _SCENARIOS, __name__))
del DdpUnderDistAutogradTest  # or it would be taken for one more class of tests
