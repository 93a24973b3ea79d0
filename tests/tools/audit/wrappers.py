"""Trainings in other wrappers, each on the body of a rank, with an audit; what they return is on rank 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.tools.audit.report import Verdict


def batches(rank: int, count: int, size: int = 6, width: int = 12) -> Any:
    data = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randn(size, width, generator=data), torch.randint(0, 7, (size,), generator=data)


def small(width: int = 30) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 7))


def found(rank: int, audit: Any) -> tuple[Verdict, list[list[float]]] | None:
    """The verdict, and the weights of rank 0's and the last rank's gradient."""
    return (audit.report.verdicts()[0], audit.report.steps[0].groups[0].weights.tolist()) if rank == 0 else None


def train(rank: int, net: nn.Module, model: nn.Module, optimizer: Any, accumulate: int = 1, **options: Any) -> Any:
    data = batches(rank, 6 * accumulate)
    with minddp.audit(model, optimizer, warm_up=2, **options) as audit:
        for _ in range(6):
            optimizer.zero_grad()
            for place in range(accumulate):
                if hasattr(net, "set_requires_gradient_sync"):
                    net.set_requires_gradient_sync(place == accumulate - 1)
                x, y = next(data)
                (cross_entropy(net(x).float(), y) / accumulate).backward()
            optimizer.step()
    return found(rank, audit)


def fsdp(rank: int, kind: str = "") -> Any:
    model, sizes = small(), {"hybrid": (2, dist.get_world_size() // 2)}.get(kind, (dist.get_world_size(),))
    names = ("replicate", "shard")[-len(sizes) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}
    if kind == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "columns":
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return train(rank, model, model, torch.optim.AdamW(model.parameters()), accumulate=2)


def fsdp_of_means(rank: int) -> Any:
    """Rank 1 has twice as many tokens in each batch; FSDP2 takes the mean of the ranks' means."""
    model = fully_shard(small(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with minddp.audit(model, optimizer, warm_up=2) as audit:
        for x, y in batches(rank, 6, size=4 * (rank + 1)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return found(rank, audit)


def zero1(rank: int) -> Any:
    model = small()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(rank, TorchDDP(model), model, optimizer)


class Words(nn.Module):
    """A sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 12, sparse=True), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x * 10).long().abs() % 50).mean(1))


def sparse(rank: int) -> Any:
    torch.manual_seed(0)
    model = Words()
    return train(rank, minddp.DistributedDataParallel(model), model, torch.optim.SGD(model.parameters(), lr=0.1))


def hooked(rank: int, hook: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = small()
    ddp = TorchDDP(model)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.1)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(rank, ddp, model, torch.optim.SGD(model.parameters(), lr=0.1))


def closure(rank: int) -> Any:
    """The optimizer calls the backward, as in Lightning."""
    model = small()
    ddp, optimizer = TorchDDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches(rank, 6)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        x, y = next(data)
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        return loss

    with minddp.audit(model, optimizer, warm_up=2) as audit:
        for _ in range(6):
            optimizer.step(run)
    return found(rank, audit)


def two_optimizers(rank: int) -> Any:
    """Both step after one backward."""
    model = small()
    ddp = TorchDDP(model)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2:].parameters())]
    with minddp.audit(model, warm_up=2) as audit:
        for x, y in batches(rank, 6):
            ddp.zero_grad()
            cross_entropy(ddp(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    return found(rank, audit)


def in_turn(rank: int) -> Any:
    """One of two optimizers steps after each backward; nothing is said of the other's parameters."""
    model = small()
    ddp = TorchDDP(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])]
    with minddp.audit(model, warm_up=2) as audit:
        for number, (x, y) in enumerate(batches(rank, 6)):
            ddp.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizers[number % 2].step()
    return found(rank, audit)


def own_hook(rank: int) -> Any:
    """A script that averages in a hook of its own, which it has registered before."""
    model = small()
    for param in model.parameters():
        param.register_hook(averaged)
    return train(rank, model, model, torch.optim.SGD(model.parameters(), lr=0.1))


def averaged(grad: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total := grad.clone())
    return total / dist.get_world_size()


def by_hand(rank: int) -> Any:
    """No optimizer; weights of the script's own, since rank 1's batches are larger."""
    model, sizes = small(), (4, 8)
    with minddp.audit(model, weights=lambda: sizes[rank]) as audit:
        for x, y in batches(rank, 4, size=sizes[rank]):
            (cross_entropy(model(x), y) * sizes[rank] / sum(sizes)).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            audit.before_update()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
    return found(rank, audit)


def unused_layers(rank: int) -> Any:
    """Each rank uses another layer."""
    layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 7)])

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[2](torch.tanh(self.layers[rank % 2](x)))

    torch.manual_seed(0)
    model = Either()
    ddp = TorchDDP(model, find_unused_parameters=True)
    return train(rank, ddp, model, torch.optim.SGD(model.parameters(), lr=0.1))


def not_finite(rank: int) -> Any:
    model = small()
    ddp, optimizer = TorchDDP(model), torch.optim.SGD(model.parameters(), lr=0.0)
    with minddp.audit(model, optimizer) as audit:
        for number, (x, y) in enumerate(batches(rank, 3)):
            ddp.zero_grad()
            (cross_entropy(ddp(x), y) * (float("inf") if number == 0 and rank else 1.0)).backward()
            optimizer.step()
    return (audit.report.verdicts()[0], audit.report.notes) if rank == 0 else None
