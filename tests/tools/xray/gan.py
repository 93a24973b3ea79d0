"""A training script with two wrapped modules, of which one is reduced twice in a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    actor = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8)))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, actor)]
    for _ in range(6):
        made = actor(torch.randn(2, 4))
        critic(made.detach()).sum().backward()
        optimizers[0].step()
        critic(made).sum().backward()
        optimizers[1].step()
    dist.destroy_process_group()
