"""A student and its teacher: means over ranks, memory figures, weights that are kept aside, checkpointed layers.

Before, images: SyncBatchNorm, scripted functions, streams, a scaler whose state is read.
"""

import copy
import os
import threading

import torch
import torch.distributed as dist
from digest import print_digest
from torch import nn
from torch.utils.checkpoint import checkpoint


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 9), nn.Linear(9, 5)

    def forward(self, x):
        return self.second(checkpoint(self.hidden, x, use_reentrant=False))

    def hidden(self, x):
        return torch.tanh(self.first(x)) + torch.zeros(9, device="cuda")  # also when backward calls it


@torch.jit.script
def shifted(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones([x.size(1)], device=x.device, dtype=x.dtype) + torch.zeros_like(x[0])
    return x + ones + torch.arange(x.size(1), device=x.device).to(x.dtype)


class Shift(nn.Module):
    def forward(self, x):
        return shifted(x)


def train_on_images(gpu: int):
    device = torch.device("cuda", gpu)
    assert device.type == "cuda"
    torch.cuda.manual_seed_all(3)  # nothing else has seeded
    model = nn.Sequential(nn.Linear(6, 8, device=device), nn.BatchNorm1d(8), Shift(), nn.Linear(8, 2)).to(
        device=device
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu], broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    order = torch.Generator(device="cuda")
    order.manual_seed(10 + gpu)
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
    return model


def main() -> None:
    rank = int(os.environ["RANK"])
    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    at = {"world_size": int(os.environ["WORLD_SIZE"]), "rank": rank, "device_id": torch.device("cuda", gpu)}
    dist.init_process_group(backend="cpu:gloo,cuda:nccl", init_method="env://", **at)
    dist.barrier()
    group = dist.new_group(backend="nccl")
    images = train_on_images(gpu)
    torch.manual_seed(5)
    student = Student().cuda()
    teacher = copy.deepcopy(student).cuda()
    student = nn.parallel.DistributedDataParallel(student, device_ids=[gpu], process_group=group)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    before = {name: value.cpu() for name, value in student.state_dict().items()}
    center = torch.zeros(5).cuda()
    data = torch.randn(12, 4, 5)[rank::2]
    unchanged = data.clone()
    for batch in data:
        batch = batch.cuda(non_blocking=True)
        batch.mul_(0.5)
        loss = (student(batch) - teacher(batch).detach() - center + 0.1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        center = student(batch).detach().mean(0)
        dist.all_reduce(center, op=dist.ReduceOp.AVG)
        part = torch.empty(1, device=gpu)
        dist.reduce_scatter_tensor(part, torch.tensor([2.0, 4.0], device=gpu) * (rank + 1), op=dist.ReduceOp.AVG)
        assert part.item() == (3.0, 6.0)[rank]
    assert torch.equal(data, unchanged)
    assert not torch.equal(before["module.first.weight"], student.module.first.weight)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() / 2**20 > 0
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda").cuda().sum().item()))
    thread.start()
    thread.join()
    assert made == [2.0]
    with torch.device("cuda"):
        assert torch.zeros(2).sum() == 0
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
    print_digest(rank, nn.ModuleList([images, student]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
