"""torch's ZeroRedundancyOptimizer: each rank steps its share of the parameters, and broadcasts it.

It is imported on the ranks only: the import compiles with torch.jit, and warns of that dozens of times.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from tests.compat.both import Trained, batches, expect_same_bits, tiny_model


def after_backward(rank: int, parameters_as_bucket_view: bool) -> Trained:
    """The optimizer is stepped by the loop, as any other."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = torch.nn.parallel.DistributedDataParallel(tiny_model())
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optimizer_class=torch.optim.Adam,
        lr=0.01,
        parameters_as_bucket_view=parameters_as_bucket_view,
    )
    for inputs, targets in batches(rank, 5):
        zero.zero_grad()
        mse_loss(ddp(inputs), targets).backward()
        zero.step()
    zero.consolidate_state_dict(to=0)
    state = [zero.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(state, src=0)
    return Trained(type(ddp), ddp.module, state)


@pytest.mark.parametrize("parameters_as_bucket_view", [False, True])
def test_sharded_steps_have_the_same_bits(pair, parameters_as_bucket_view: bool) -> None:
    expect_same_bits(pair, after_backward, parameters_as_bucket_view)


def during_backward(rank: int, shard_buckets: bool) -> Trained:
    """A communication hook steps the optimizer as soon as the last bucket is on its way; `zero.step` does nothing.

    The hook's author forbids gloo, on which its other variant, with steps in the futures' callbacks, may hang. This
    one waits for the futures in order, so it works if the check of the backend is replaced.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = torch.nn.parallel.DistributedDataParallel(
        tiny_model(), bucket_cap_mb=0.0002, gradient_as_bucket_view=True
    )
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.Adam, overlap_with_ddp=True, lr=0.01
    )
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        hook = hook_with_zero_step(allreduce_hook, ddp, zero, shard_buckets=shard_buckets)
    ddp.register_comm_hook(None, hook)
    untrained = torch.cat([param.detach().flatten() for param in ddp.parameters()])
    for inputs, targets in batches(rank, 6):
        zero.zero_grad()
        mse_loss(ddp(inputs), targets).backward()
        zero.step()
    trained = torch.cat([param.detach().flatten() for param in ddp.parameters()])
    assert not torch.equal(untrained, trained)
    return Trained(type(ddp), ddp.module)


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_steps_that_overlap_with_backward_have_the_same_bits(pair, shard_buckets: bool) -> None:
    expect_same_bits(pair, during_backward, shard_buckets)
