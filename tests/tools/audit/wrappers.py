"""Trainings in other wrappers, each on the body of a rank, with an audit; what they return is on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
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


class Found(NamedTuple):
    """The verdict, the weights of each rank's gradient, and the report's notes."""

    verdict: Verdict
    weights: list[list[float]]
    notes: Sequence[str]

    @classmethod
    def of(cls, rank: int, audit: Any) -> Found | None:
        if rank > 0:
            return None
        report = audit.report
        weights = report.steps[0].groups[0].weights.tolist() if report.steps else []
        return cls(report.verdicts()[0], weights, report.notes)


def train(
    rank: int,
    net: nn.Module,
    model: nn.Module,
    *optimizers: Any,
    accumulate: int = 1,
    size: int = 6,
    in_turn: bool = False,
    by_closure: bool = False,
    infinite_at: tuple[int, int] = (-1, -1),
) -> Found | None:
    """Six steps. One of the optimizers steps after each backward, `in_turn`, or all. The audit has to find several.

    `by_closure`: the optimizer calls the backward, as in Lightning. `infinite_at`: where a loss is infinite.
    """
    data = batches(rank, 6 * accumulate, size)

    def gradients() -> torch.Tensor:
        net.zero_grad()
        for place in range(accumulate):
            if hasattr(net, "set_requires_gradient_sync"):
                net.set_requires_gradient_sync(place == accumulate - 1)
            x, y = next(data)
            loss = cross_entropy(net(x).float(), y) / accumulate
            (loss * float("inf") if infinite_at == (rank, number) else loss).backward()
        return loss

    with minddp.audit(model, optimizers[0] if len(optimizers) == 1 else None, warm_up=2) as audit:
        for number in range(6):
            if by_closure:
                optimizers[0].step(gradients)
                continue
            gradients()
            for optimizer in optimizers[number % 2 :: 2] if in_turn else optimizers:
                optimizer.step()
    return Found.of(rank, audit)


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
    return train(rank, model, model, torch.optim.SGD(model.parameters(), lr=0.1), size=4 * (rank + 1))


def tensor_parallel(rank: int) -> str:
    """The error."""
    model = small()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel()})
    with pytest.raises(RuntimeError) as caught, minddp.audit(model):
        raise AssertionError("the audit has begun")
    return str(caught.value)


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
    model = small()
    return train(rank, TorchDDP(model), model, torch.optim.SGD(model.parameters(), lr=0.1), by_closure=True)


def two_optimizers(rank: int, in_turn: bool) -> Any:
    """Both step after one backward; or one of them in turn, and nothing is said of the other's parameters."""
    model = small()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2:].parameters())
    return train(rank, TorchDDP(model), model, first, second, in_turn=in_turn)


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
    return Found.of(rank, audit)


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
    """In the first step of the audit; from then on the parameters are not numbers."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(rank, TorchDDP(model), model, optimizer, infinite_at=(1, 2))
