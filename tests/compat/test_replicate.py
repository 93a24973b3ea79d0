"""torch.distributed's `replicate`: data parallelism without a wrapper around the model, but one hidden inside."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.compat.both import Trained, batches, expect_same_bits, tiny_model


def replicated(rank: int) -> Trained:
    from torch.distributed._composable.replicate import replicate

    model = replicate(tiny_model(), bucket_cap_mb=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = batches(rank, 6)
    for number, (inputs, targets) in enumerate(data):
        accumulating = number % 2 == 0
        model.set_requires_gradient_sync(not accumulating)
        mse_loss(model(inputs), targets).backward()
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return Trained(type(replicate.state(model)._ddp), model, optimizer.state_dict())


def test_a_replicated_module_trains_with_the_same_bits(pair) -> None:
    expect_same_bits(pair, replicated)
