"""A network for images that starts a process per device itself, saves a checkpoint and resumes from it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digest import print_digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def work(gpu: int, ngpus: int, folder: Path) -> None:
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group(backend="nccl", init_method=rendezvous, world_size=ngpus, rank=gpu)
    torch.cuda.set_device(gpu)
    torch.manual_seed(gpu)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model.cuda(gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu], output_device=gpu)
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(7)
    images = TensorDataset(torch.randn(16, 3, 8, 8), torch.randint(3, (16,)))
    sampler = DistributedSampler(images)
    loader = DataLoader(images, batch_size=4, sampler=sampler, num_workers=1, pin_memory=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = criterion(model(inputs.cuda(gpu, non_blocking=True)), targets.cuda(gpu, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if gpu == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
        dist.barrier(device_ids=[gpu])
        state = torch.load(folder / "checkpoint.pt", map_location=f"cuda:{gpu}")
        torch.load(folder / "checkpoint.pt", map_location={"cuda:0": f"cuda:{gpu}"})
        torch.load(folder / "checkpoint.pt", map_location=lambda storage, location: storage.cuda(gpu))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print_digest(gpu, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, nprocs=torch.cuda.device_count(), args=(torch.cuda.device_count(), Path(sys.argv[1])))
