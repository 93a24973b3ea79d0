"""Other ways to the same weights: FSDP2, DeepSpeed and torchft."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from benchmarks.harness import gathered
from benchmarks.workloads import Step, Workload, device_of


def whole(param: Tensor) -> Tensor:
    """All of a parameter that is spread over the ranks. Collective."""
    return param.full_tensor() if isinstance(param, DTensor) else param


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2, with a unit of its own for each child of at least 1 MiB."""
    for child in model.children():
        if sum(p.nbytes for p in child.parameters()) >= 2**20 and not isinstance(child, nn.ModuleList):
            fully_shard(child)
    fully_shard(model)
    return model


def step_of_deepspeed(stage: int, model: nn.Module, task: Workload, rank: int) -> Step:
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    settings |= {"zero_allow_untested_optimizer": True}
    optimizer = SGD(model.parameters(), lr=task.learning_rate)
    with mock.patch.dict(os.environ, LOCAL_RANK=str(rank)):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    loss = task.objective(rank, device_of(model))

    def step() -> None:
        engine.backward(loss(engine))
        engine.step()

    return step


def step_of_torchft(model: nn.Module, task: Workload, rank: int) -> Step:
    """Each rank is a group of replicas by itself; in each step they form a quorum by a lighthouse of rank 0's."""
    os.environ.setdefault("RUST_LOG", "error")  # or each quorum is a line
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.ddp import DistributedDataParallel as FaultTolerantDDP
    from torchft.optim import OptimizerWrapper

    world, limit, host = dist.get_world_size(), timedelta(seconds=30), "localhost"
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world) if rank == 0 else None
    address = gathered(lighthouse and f"http://{host}:{lighthouse.address().rpartition(':')[2]}")[0]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    settings: dict[str, Any] = {"store_addr": host, "store_port": store.port, "lighthouse_addr": address}
    settings |= {"rank": 0, "world_size": 1, "hostname": host, "replica_id": f"rank {rank}", "timeout": limit}
    group = ProcessGroupGloo(timeout=limit)
    manager = Manager(group, None, None, world, init_sync=False, use_async_quorum=False, **settings)
    atexit.register(lambda: (manager.shutdown(), store, lighthouse))
    ddp = FaultTolerantDDP(manager, model)
    optimizer = OptimizerWrapper(manager, SGD(model.parameters(), lr=task.learning_rate))
    loss = task.objective(rank, device_of(model))

    def step() -> None:
        optimizer.zero_grad()
        loss(ddp).backward()
        optimizer.step()

    return step
