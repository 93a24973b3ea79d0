"""Mistakes in the training script around DDP. They raise no error, but the numbers differ.

As in `traps.py`, most examples use a module with given gradients, so each result shows its terms.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset

from docs.learning.traps import Given, grads, on_every_rank
from minddp import DistributedDataParallel

NUMBERS = TensorDataset(torch.arange(8))


def batches(sampler: Sampler[int]) -> str:
    loader = DataLoader(NUMBERS, batch_size=2, sampler=sampler)
    return "  ".join(" ".join(str(number) for number in batch.tolist()) for (batch,) in loader)


def sampler(rank: int) -> str:
    """An epoch over eight samples, with and without a DistributedSampler."""
    same_seed = RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(0))
    dealt: DistributedSampler[int] = DistributedSampler(NUMBERS, seed=0)
    return (
        f"a shuffled loader on each rank\n{on_every_rank(batches(same_seed))}\n\n"
        f"with DistributedSampler\n{on_every_rank(batches(dealt))}"
    )


def epoch(rank: int) -> str:
    """Two epochs, with and without `set_epoch`."""
    lines = []
    for calls_it in (False, True):
        dealt: DistributedSampler[int] = DistributedSampler(NUMBERS, seed=0)
        for number in range(2):
            if calls_it:
                dealt.set_epoch(number)
            lines.append(f"epoch {number}, rank 0: {batches(dealt)}")
        lines.append("")
    return "\n".join(["without set_epoch", *lines[:3], "with set_epoch", *lines[3:-1]])


def rate(rank: int) -> str:
    """Eight samples that pull a weight from 0 to 10: an epoch with batches of 1, on both ranks and on one."""
    texts = []
    for name, ranks, learning_rate in (
        ("1 rank, rate 0.05", 1, 0.05),
        ("2 ranks, rate 0.05", 2, 0.05),
        ("2 ranks, rate 0.10", 2, 0.10),
    ):
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        ddp = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
        for _ in range(8 // ranks):  # a mean over two equal gradients is that of one rank
            optimizer.zero_grad()
            (0.5 * (ddp(torch.ones(1)) - 10).square()).sum().backward()
            optimizer.step()
        texts.append(f"{name}: {8 // ranks} steps, the weight is {module.weight.item():.2f}")
    return "\n".join(texts)


def clip(rank: int) -> str:
    """Gradients of 100 on rank 0 and 2 on rank 1, whose mean is 51, clipped to a norm of 10."""
    texts = []
    for is_early in (True, False):
        module = Given("w")
        ddp = DistributedDataParallel(module)
        given = {"w": 100.0 if rank == 0 else 2.0}
        if is_early:
            with ddp.no_sync():
                ddp(given).backward()
            clip_grad_norm_(module.parameters(), 10.0)
            for param in module.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        else:
            ddp(given).backward()
            clip_grad_norm_(module.parameters(), 10.0)
        texts.append(f"clipped {'before' if is_early else 'after'} averaging: {grads(module)}")
    return "\n".join(texts)


def means(rank: int) -> str:
    """Rank 0 validates on 30 samples with a loss of 1 each, rank 1 on 10 with a loss of 5."""
    losses = torch.full((30,), 1.0) if rank == 0 else torch.full((10,), 5.0)
    mean = losses.mean()
    dist.all_reduce(mean)
    total = torch.stack((losses.sum(), torch.tensor(float(len(losses)))))
    dist.all_reduce(total)
    return f"mean of means: {mean / 2:g}\nsum / count:   {total[0] / total[1]:g}"


def saving(rank: int) -> str:
    """Every rank writes the same file in pieces; the file is read when both are half done."""
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    path = Path(str(folders[0]), "checkpoint")
    with path.open("r+b" if path.exists() else "wb") as file:
        dist.barrier()
        if rank == 0:
            file.write(b"0 0 0 0 ")
            file.flush()
        dist.barrier()
        if rank == 1:
            file.write(b"1 1 ")
            file.flush()
        dist.barrier()
        everybody = path.read_text().strip()
    dist.barrier()
    if rank == 0:
        part = path.with_suffix(".part")
        part.write_text("0 0 0 0 ")
        os.replace(part, path)
    dist.barrier()
    alone = path.read_text().strip()
    dist.barrier()
    if rank == 0:
        path.unlink()
        path.parent.rmdir()
    return f"every rank saves: {everybody}\nrank 0 saves:     {alone}"


def tokens(rank: int) -> str:
    """Rank 0 has 3 tokens with the gradient 1 each, rank 1 has 1 token with the gradient 9: the mean is 12 / 4."""
    num_tokens, gradient = (3, 1.0) if rank == 0 else (1, 9.0)
    module = Given("w")
    ddp = DistributedDataParallel(module)
    ddp({"w": gradient}).backward()  # the mean over this rank's tokens
    texts = [f"mean of the ranks' means: {grads(module)}"]
    ddp.zero_grad()
    ddp.weigh(num_tokens)
    ddp({"w": gradient}).backward()
    texts.append(f"with ddp.weigh(tokens):   {grads(module)}")
    return "\n".join(texts)


def accumulation(rank: int) -> str:
    """On each rank two micro-batches: 3 tokens with the gradient 1, then 1 token with the gradient 9."""
    micro_batches = ((3, 1.0), (1, 9.0))
    total = sum(num_tokens for num_tokens, _ in micro_batches)
    texts = []
    for name, scale in (("each mean / 2", lambda n: 1 / 2), ("each sum / tokens of all", lambda n: n / total)):
        module = Given("w")
        ddp = DistributedDataParallel(module)
        for place, (num_tokens, mean) in enumerate(micro_batches):
            ddp.require_backward_grad_sync = place == 1  # as under no_sync
            ddp({"w": mean * scale(num_tokens)}).backward()
        texts.append(f"{name}: {grads(module)}")
    return "\n".join(texts)
