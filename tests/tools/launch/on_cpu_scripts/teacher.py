"""A student and its teacher: means over ranks, memory figures, weights that are kept aside, checkpointed layers."""

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


def main() -> None:
    rank = int(os.environ["RANK"])
    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    dist.init_process_group(backend="cpu:gloo,cuda:nccl", world_size=int(os.environ["WORLD_SIZE"]), rank=rank)
    group = dist.new_group(backend="nccl")
    torch.manual_seed(5)
    student = Student().cuda()
    teacher = copy.deepcopy(student).cuda()
    student = nn.parallel.DistributedDataParallel(student, device_ids=[gpu], process_group=group)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    before = {name: value.cpu() for name, value in student.state_dict().items()}
    center = torch.zeros(5).cuda()
    data = torch.randn(12, 4, 5)[rank::2]
    unchanged = data.clone()
    for images in data:
        images = images.cuda(non_blocking=True)
        images.mul_(0.5)
        loss = (student(images) - teacher(images).detach() - center + 0.1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        center = student(images).detach().mean(0)
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
    print_digest(rank, student)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
