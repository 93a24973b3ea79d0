"""Trainings in which nothing is wrong, on two ranks, with torch's classes or none. `minddp.watch` is silent."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.tools.watchdog.bugs import STEPS, Detector, adam, batches, network, sharded, train


def hooked(hook: Callable[..., Any], state: Any = None) -> nn.Module:
    ddp = DDP(network())
    ddp.register_comm_hook(state, hook)
    return ddp


def local() -> post_localSGD_hook.PostLocalSGDState:
    return post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=5)


class Hides(nn.Module):
    """No tensor is found in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(square=self.body(x).square)


def with_a_frozen_layer() -> nn.Sequential:
    model = network()
    model[0].requires_grad_(False)
    return model


def replicas_of_shards() -> nn.Module:
    """HSDP, with shards of one rank."""
    return fully_shard(network(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: DDP(network()),
    "batch_norm": lambda: DDP(nn.Sequential(network(), nn.BatchNorm1d(4))),
    "low_rank_adapter": lambda: DDP(with_a_frozen_layer()),
    "compression": lambda: hooked(default_hooks.fp16_compress_hook),
    "post_local_sgd": lambda: hooked(post_localSGD_hook.post_localSGD_hook, local()),
    "hidden_output": lambda: DDP(Hides()),
    "unused_parameters": lambda: DDP(Detector(), find_unused_parameters=True),
    "static_graph": lambda: DDP(network(), static_graph=True),
    "shards": lambda: sharded(network()),
    "replicas_of_shards": replicas_of_shards,
    "replicated": lambda: replicate(network()),
}


def trains(make: Callable[[], nn.Module]) -> Callable[[int], None]:
    def script(rank: int) -> None:
        model = make()
        train(model, adam(model), batches(rank, 3 * STEPS))

    return script


CALM = {name: trains(make) for name, make in MODULES.items()}


def calm(script: Callable[[int], None]) -> Callable[[int], None]:
    CALM[script.__name__] = script
    return script


@calm
def accumulation(rank: int) -> None:
    ddp = DDP(network())
    optimizer = adam(ddp)
    for step, x in enumerate(batches(rank, 3 * STEPS)):
        if step % 3 == 2:
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with ddp.no_sync():
                ddp(x).square().mean().backward()


@calm
def moving_average(rank: int) -> None:
    """A copy of the wrapper on rank 0 alone."""
    ddp = DDP(network())
    optimizer, average = adam(ddp), copy.deepcopy(ddp) if rank == 0 else None

    def update(_step: int) -> None:
        for own, param in zip(average.parameters() if average else (), ddp.parameters(), strict=False):
            own.data.lerp_(param.data, 0.1)

    train(ddp, optimizer, batches(rank), update)


@calm
def gan(rank: int) -> None:
    generator, critic = DDP(network()), DDP(nn.Linear(4, 1))
    optimizers = adam(generator), adam(critic)
    for x in batches(rank):
        optimizers[1].zero_grad()
        critic(generator(x).detach()).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic.requires_grad_(False)
        critic.module(generator(x)).mean().backward()
        critic.requires_grad_(True)
        optimizers[0].step()


@calm
def local_sgd(rank: int) -> None:
    """No wrapper; parameters are averaged every 8 steps."""
    model = network()

    def average(step: int) -> None:
        if step % 8 == 0:
            for param in model.parameters():
                dist.all_reduce(param.data)
                param.data /= 2

    train(model, adam(model), batches(rank, 3 * STEPS), average)


@calm
def reduces_by_itself(rank: int) -> None:
    model = network()

    def average(_step: int) -> None:
        for work in [dist.all_reduce(param.grad, async_op=True) for param in model.parameters()]:
            work.wait()

    train(model, adam(model), batches(rank, 3 * STEPS), average)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied(batches(rank, 1)[0]).sum().backward()


@calm
def join(rank: int) -> None:
    ddp = DDP(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(2):
        with ddp.join():
            train(ddp, optimizer, batches(10 * epoch + rank, 12 - 3 * rank))


@calm
def join_with_zero(rank: int) -> None:
    ddp = DDP(network())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        train(ddp, optimizer, batches(rank, 12 - 3 * rank))


@calm
def zero(rank: int) -> None:
    ddp = DDP(network())
    train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2), batches(rank))


@calm
def checkpoint(rank: int) -> None:
    """Rank 0 saves, and all load."""
    ddp = DDP(network())
    optimizer = adam(ddp)
    train(ddp, optimizer, batches(rank))
    saved = [pickle.dumps((ddp.module.state_dict(), optimizer.state_dict())) if rank == 0 else None]
    dist.broadcast_object_list(saved)
    ddp = DDP(network())
    ddp.module.load_state_dict(pickle.loads(saved[0])[0])
    optimizer = adam(ddp)
    optimizer.load_state_dict(pickle.loads(saved[0])[1])
    train(ddp, optimizer, batches(10 + rank))


@calm
def pickled_wrapper(rank: int) -> None:
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(rank))
    pickle.loads(pickle.dumps(ddp))
    copy.deepcopy(ddp.module)


@calm
def evaluation_on_rank_0(rank: int) -> None:
    ddp = DDP(network())

    def evaluate(step: int) -> None:
        if rank == 0 and step % 5 == 0:
            with torch.no_grad():
                ddp.module(batches(99, 1)[0])
            time.sleep(0.1)

    train(ddp, adam(ddp), batches(rank), evaluate)


@calm
def several_groups(rank: int) -> None:
    """Each rank has its own group for statistics, and both train in a second one of all ranks."""
    own = [dist.new_group([one]) for one in range(2)][rank]
    ddp = DDP(network(), process_group=dist.new_group([0, 1]))
    train(ddp, adam(ddp), batches(rank), lambda step: dist.all_reduce(torch.ones(1 + rank), group=own))


@calm
def two_optimizers(rank: int) -> None:
    ddp = DDP(network())
    layers = [adam(layer) for layer in (ddp.module[0], ddp.module[2])]
    for x in batches(rank):
        ddp(x).square().mean().backward()
        for optimizer in layers:
            optimizer.step()
            optimizer.zero_grad()


@calm
def scaled_gradients(rank: int) -> None:
    """Two steps overflow, and are left out."""
    ddp = DDP(network())
    optimizer, scaler = adam(ddp), torch.amp.GradScaler("cpu")
    for step, x in enumerate(batches(rank)):
        optimizer.zero_grad()
        scaler.scale(ddp(x).square().mean() * (1e36 if step in (0, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


@calm
def an_exception_in_backward(rank: int) -> None:
    ddp = DDP(network())
    optimizer = adam(ddp)
    for step, x in enumerate(batches(rank)):
        optimizer.zero_grad()
        output = ddp(x)
        if step == 5:  # on all ranks, before any gradient
            output.register_hook(lambda grad: 1 / 0)
        try:
            output.square().mean().backward()
        except ZeroDivisionError:
            continue
        optimizer.step()


@calm
def one_batch(rank: int) -> None:
    """Overfits on purpose."""
    ddp = DDP(network())
    train(ddp, adam(ddp), batches(rank, 1) * STEPS)
