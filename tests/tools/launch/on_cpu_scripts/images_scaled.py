"""SyncBatchNorm, scripted functions, a scaler whose state is read."""

import os

import torch
import torch.distributed as dist
from digest import print_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.jit.script
def shifted(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones([x.size(1)], device=x.device, dtype=x.dtype) + torch.zeros_like(x[0])
    return x + ones + torch.arange(x.size(1), device=x.device).to(x.dtype)


class Shift(nn.Module):
    def forward(self, x):
        return shifted(x)


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    assert device.type == "cuda"
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", init_method="env://", device_id=device)
    dist.barrier()
    torch.cuda.manual_seed_all(3)  # nothing else seeds
    model = nn.Sequential(nn.Linear(6, 8, device=device), nn.BatchNorm1d(8), Shift(), nn.Linear(8, 2)).to(
        device=device
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[local_rank], broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    order = torch.Generator(device="cuda")
    order.manual_seed(10 + local_rank)
    assert isinstance(order, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    copies = torch.cuda.Stream(device=device)
    inputs = torch.randn(5, 4, 6, device=device, generator=order)
    for batch in inputs:
        with torch.cuda.stream(copies):
            batch = batch.to(device=device, non_blocking=True).sub_(0.5)
        torch.cuda.current_stream(device=device).wait_stream(copies)
        batch.record_stream(torch.cuda.current_stream())
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.state_dict()["scale"] > 0
        torch.cuda.synchronize()
    print_digest(dist.get_rank(), model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
