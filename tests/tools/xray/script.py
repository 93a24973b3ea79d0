"""A training script that uses torch and not minddp."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--note", type=Path)

if __name__ == "__main__":
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp = DistributedDataParallel(model)
    if options.note and dist.get_rank() == 0:
        options.note.write_text(f"{type(ddp).__module__} {__name__}")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.eval()
    with torch.no_grad():
        ddp(torch.ones(2, 16))  # an evaluation before training: no step
    ddp.train()
    for step in range(options.steps):
        for _ in range(options.accumulate - 1):
            with ddp.no_sync():
                ddp(torch.ones(2, 16)).sum().backward()
        if step == options.fail_at:
            raise ValueError("the script has failed")
        ddp(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
