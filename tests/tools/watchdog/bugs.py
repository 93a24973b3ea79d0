"""Bugs that users of torch's classes have had, each rebuilt from its description: what `minddp.watch` says of them.

Each function is one rank's part of a training on two. `test_watch.py` runs them, and `docs/watch.md` lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 25


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(seed: int, number: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=generator) for _ in range(number)]


def train(
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: list[Tensor],
    before_step: Callable[[int], object] = lambda step: None,
) -> None:
    for step, x in enumerate(data):
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        before_step(step)
        optimizer.step()


def adam(module: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=lr)


# ---------------------------------------------------------------------- gradients that are not averaged


def forward_of_the_unwrapped_model(rank: int) -> None:
    """trl 7245 and 7246, minimind 853: the loss is computed with `.module`."""
    ddp = DDP(network())
    train(ddp.module, adam(ddp), batches(rank))


def unwrapped_before_training(rank: int) -> None:
    """sd-scripts 924: the wrapper is replaced by the model that it wraps, to reach an attribute."""
    prepared = [DDP(network())]  # as Accelerate keeps it
    model = prepared[0].module
    train(model, adam(model), batches(rank))


def a_method_of_the_module(rank: int) -> None:
    """trl 5282, icefall 226: a loss that is a method of the model, called beside the wrapper in some steps."""
    ddp, x_of = DDP(network()), batches(rank)
    optimizer = adam(ddp)
    for step, x in enumerate(x_of):
        optimizer.zero_grad()
        (ddp.module if step % 5 == 4 else ddp)(x).square().mean().backward()
        optimizer.step()


def no_sync_that_never_ends(rank: int) -> None:
    """The last backward of an accumulation is within `no_sync`, too."""
    ddp = DDP(network())
    optimizer = adam(ddp)
    for x in batches(rank):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(x).square().mean().backward()
        optimizer.step()


def never_wrapped(rank: int) -> None:
    """miles-credit 153: started on several ranks, but nothing averages."""
    model = network()
    train(model, adam(model), batches(rank, 60))


def averages_some_gradients(rank: int) -> None:
    """A loop that all-reduces by itself leaves out the biases."""
    model = network()

    def average(step: int) -> None:
        for param in model.parameters():
            if param.dim() > 1:
                dist.all_reduce(param.grad)

    train(model, adam(model), batches(rank, 60), average)


# ---------------------------------------------------------------------- replicas and data


def another_learning_rate(rank: int) -> None:
    ddp = DDP(network())
    train(ddp, adam(ddp, lr=1e-2 * (1 + rank)), batches(rank))


def learning_rate_of_shards(rank: int) -> None:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    train(model, adam(model, lr=1e-2 * (1 + rank)), batches(rank))


def learning_rate_of_a_replicated_module(rank: int) -> None:
    model = replicate(network())
    train(model, adam(model, lr=1e-2 * (1 + rank)), batches(rank))


def a_checkpoint_of_rank_0(rank: int) -> None:
    """Only rank 0 has loaded the optimizer."""
    ddp = DDP(network())
    optimizer = adam(ddp)
    train(ddp, optimizer, batches(0, 3))
    if rank == 0:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(3)
    train(ddp, optimizer, batches(rank))


def learning_rate_with_zero(rank: int) -> None:
    """Each rank steps a part of the parameters and sends it to all: they stay equal."""
    ddp = DDP(network())
    train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2 * (1 + rank)), batches(rank))


def same_data(rank: int) -> None:
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(0))


def set_epoch_forgotten(rank: int) -> None:
    data = torch.utils.data.TensorDataset(torch.cat(batches(0, 24)))
    sampler = torch.utils.data.DistributedSampler(data)
    ddp = DDP(network())
    optimizer = adam(ddp)
    for _ in range(2):
        train(ddp, optimizer, [x for (x,) in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)])


def a_batch_with_nan(rank: int) -> None:
    ddp, data = DDP(network()), batches(rank)
    data[7][0] *= float("nan") if rank == 1 else 1.0
    train(ddp, adam(ddp), data)


# ---------------------------------------------------------------------- waits


BUSY = 1.0  # times as long


def busy(seconds: float) -> None:
    time.sleep(BUSY * seconds)


def collective_on_rank_0(rank: int) -> None:
    """autocast 386, Diffusion-Planner 256, Lightning 19106: rank 0 alone logs, and meets the others therein."""
    ddp = DDP(network())

    def log(step: int) -> None:
        if rank == 0 and step == 5:
            dist.barrier()

    train(ddp, adam(ddp), batches(rank), log)


def head_without_objects(rank: int) -> None:
    """ultralytics 24675, peft 951: on a batch without objects a rank does not use a head, and then validates."""
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(4, 4)})
    model.forward = lambda x, uses: model["head"](model["body"](x)) if uses else model["body"](x)  # type: ignore
    ddp = DDP(model)
    optimizer = adam(ddp)
    for step, x in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        ddp(x, rank == 0 or step < 5).square().mean().backward()
    busy(4.0)  # validates


def fewer_batches(rank: int) -> None:
    """Rank 1 has a batch less, and meets the others again after the epoch."""
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(rank, 10 - rank))
    dist.barrier()


def stops_to_evaluate(rank: int) -> None:
    """Rank 1 is busy for long, so the others wait."""
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(rank, 10), lambda step: busy(4.0 * rank * (step == 5)))


BUGS: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    function.__name__: (function, words)
    for function, *words in (
        (forward_of_the_unwrapped_model, "20 optimizer steps without a synchronised backward", "Call the wrapper"),
        (unwrapped_before_training, "20 optimizer steps without a synchronised backward", "Call the wrapper"),
        (a_method_of_the_module, "An optimizer made 2 steps for 1 synchronised backward", "Call the wrapper"),
        (no_sync_that_never_ends, "Every forward since was within `no_sync`"),
        (never_wrapped, "they are not averaged. Wrap the module in DistributedDataParallel"),
        (averages_some_gradients, "The gradients of `0.bias`, `2.bias` differed when the optimizer stepped"),
        (another_learning_rate, "`lr of group 0` is 0.01 on rank 0, but 0.02 on rank 1. Set the same"),
        (learning_rate_of_shards, "`lr of group 0` is 0.01 on rank 0, but 0.02 on rank 1. Set the same"),
        (
            learning_rate_of_a_replicated_module,
            "`lr of group 0` is 0.01 on rank 0, but 0.02 on rank 1. Set the same",
        ),
        (a_checkpoint_of_rank_0, "or the optimizer's state differs (only one rank has loaded a checkpoint"),
        (learning_rate_with_zero, "`lr of group 0` is 0.01 on rank 0, but 0.02 on rank 1. Set the same"),
        (same_data, "All 2 ranks train on the same data", "DistributedSampler"),
        (set_epoch_forgotten, "the batches of steps 12 to 19 are the first 8 again", "`sampler.set_epoch"),
        (a_batch_with_nan, "In step 7 gradients of rank 1 are not finite, first that of `2.", "look at the batch"),
    )
}
WAITS: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    function.__name__: (function, words)
    for function, *words in (
        (collective_on_rank_0, "`barrier` (bugs.py:", "backward, at its end", "make each on all ranks or on none"),
        (head_without_objects, "Rank 1 has not produced gradients for `head.weight`, `head.bias`: backward 6"),
        (fewer_batches, "`barrier` (bugs.py:", "backward, at its end", "`drop_last=True`", "`ddp.join()`"),
        (stops_to_evaluate, "Rank 1 is between backwards", "bugs.py:", "in busy"),
    )
}
