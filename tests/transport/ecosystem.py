"""Trains by what torch builds on process groups, over the backend named on the command line; prints digests.

Each case returns tensors, whose digest is printed for each rank: two backends with the same bits print the same.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoints
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import minddp  # noqa: F401  # registers the backend

Case = Callable[[], Any]


def values(*shape: int, seed: int | None = None) -> Tensor:
    """Those of this rank, or with a seed those of all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank() if seed is None else seed))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 32))


def trained(module: Any, optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        module(values(8, 32)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return list(module.parameters())


def sharded(**options: Any) -> Any:
    module = model()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(module, **options)


def fsdp2() -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return trained(sharded()) + trained(sharded(mp_policy=policy, reshard_after_forward=False))


def hybrid_shards() -> Any:
    return trained(
        sharded(mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    )


def fsdp1() -> Any:
    return trained(FullyShardedDataParallel(model(), device_id=torch.device("cpu")))


def zero() -> Any:
    ddp = DistributedDataParallel(model())
    return trained(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01))


def tensor_parallel() -> Any:
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(32), "wide": nn.Linear(32, 64), "narrow": nn.Linear(64, 32)}
    styles = {
        "norm": SequenceParallel(),
        "wide": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Shard(1)),
    }
    module: Any = nn.Sequential()
    for name, layer in layers.items():
        module.add_module(name, layer)
    module = parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), styles)
    module(values(2, 8, 32)).square().mean().backward()
    return [param.grad for param in module.parameters()]


def redistributed() -> Any:
    mesh, results = init_device_mesh("cpu", (dist.get_world_size(),)), []
    whole, placements = values(9, 7, seed=1), (Shard(0), Shard(1), Replicate())
    for source in placements:
        results += [distribute_tensor(whole, mesh, [source]).redistribute(mesh, [it]) for it in placements]
    for op in ("sum", "avg", "max"):
        results += [DTensor.from_local(values(9, 7), mesh, [Partial(op)]).redistribute(mesh, [Replicate()])]
    return [*results, DTensor.from_local(values(9, 7), mesh, [Partial()]).redistribute(mesh, [Shard(0)])]


def pipeline() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    layer, whole = nn.Linear(16, 16), values(4 * size, 16, seed=1)
    schedule = Schedule1F1B(
        PipelineStage(layer, rank, size, torch.device("cpu")),
        2 * size,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    schedule.step(*([whole] if rank == 0 else []), **({"target": whole} if rank == size - 1 else {}))
    return layer.weight.grad


def restored() -> Any:
    saved, loaded = sharded(), sharded()
    trained(saved)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        checkpoints.save(saved.state_dict(), checkpoint_id=folder[0])
        state = loaded.state_dict()
        checkpoints.load(state, checkpoint_id=folder[0])
        loaded.load_state_dict(state)
        dist.barrier()
    return list(loaded.parameters())


def gradients_of_collectives() -> Any:
    x = values(4, 4).requires_grad_()
    results = [differentiable.all_reduce(x * 1), *differentiable.all_gather(x * 2), differentiable.broadcast(x, 0)]
    sum((it**2).sum() for it in results).backward()
    return [x.grad, *results]


def compiled() -> Any:
    def collectives(x: Tensor) -> Tensor:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return total + functional.all_gather_tensor(x, 0, dist.group.WORLD).sum()

    return torch.compile(collectives, backend="aot_eager")(values(8))


def coalesced() -> Any:
    tensors = [values(5), values(7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors


CASES: tuple[Case, ...] = (
    fsdp2,
    hybrid_shards,
    fsdp1,
    zero,
    tensor_parallel,
    redistributed,
    pipeline,
    restored,
    gradients_of_collectives,
    compiled,
    coalesced,
)


def digest(result: Any) -> str:
    sha = hashlib.sha256()
    for each in result if isinstance(result, list) else [result]:
        tensor = each.to_local() if isinstance(each, DTensor) else each
        sha.update(str((tensor.dtype, tensor.shape)).encode())
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1])
    for case in CASES:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, digest(case()))
        if dist.get_rank() == 0:
            print(case.__name__, *found, flush=True)
    dist.destroy_process_group()
