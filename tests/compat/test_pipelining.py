"""torch.distributed.pipelining: a stage that is replicated communicates in the last micro-batch's backward only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

from tests.compat.both import Trained, batches, expect_same_bits, tiny_model


def replicated_stage(rank: int) -> Trained:
    """One stage, replicated on both ranks: the pipeline itself has nothing to communicate."""
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    ddp = torch.nn.parallel.DistributedDataParallel(tiny_model(), forward_sync_buffers=False)
    stage = PipelineStage(
        ddp,
        stage_index=0,
        num_stages=1,
        device=torch.device("cpu"),
        # Given the shapes, it does not find them by a forward and a backward, to which torch's class objects.
        input_args=torch.empty(4, 6),
        output_args=torch.empty(4, 3),
        group=groups[rank],
    )
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=mse_loss)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    for inputs, targets in batches(rank, 4, size=16):
        optimizer.zero_grad()
        schedule.step(inputs, target=targets)
        optimizer.step()
    return Trained(type(ddp), ddp.module, optimizer.state_dict())


def test_a_replicated_stage_ends_with_the_same_bits(pair) -> None:
    expect_same_bits(pair, replicated_stage)
