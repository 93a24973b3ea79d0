"""The wheel's tests of DDP under RPC and distributed autograd, over the TensorPipe agent.

Only ever imported in a stage, as `wheel_ddp`.
"""

from __future__ import annotations

from torch.testing._internal.distributed import ddp_under_dist_autograd_test as wheel
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests

_SCENARIOS = [wheel.DdpComparisonTest, wheel.DdpUnderDistAutogradTest, wheel.CudaDdpComparisonTest]

globals().update(generate_tests("TensorPipe", TensorPipeRpcAgentTestFixture, _SCENARIOS, __name__))
