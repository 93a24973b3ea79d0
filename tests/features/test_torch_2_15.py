"""What torch 2.15 brings that a wrapper meets. Each test asks for what it needs, not for a version.

Hooks of a group, groups that are reconfigured, backends that packages bring, and repaired quantization hooks.
"""

from __future__ import annotations

import inspect
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.features.beside import Trail, Wrap, assert_same, play, random, snapshot
from tests.ranks import RankPool, on_ranks


def needs(*names: str) -> pytest.MarkDecorator:
    """Of the process group."""
    missing = [name for name in names if not hasattr(dist.ProcessGroup, name)]
    return pytest.mark.skipif(bool(missing), reason=f"this torch's groups have no {', '.join(missing)}")


def _train(wrap: Wrap, rank: int, hook: Any = None, **options: Any) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    trail: Trail = []
    for step in range(3):
        optimizer.zero_grad()
        ddp(random(4, 6, rank=rank, step=step)).square().sum().backward()
        optimizer.step()
        trail.append(snapshot(ddp))
    return trail


# ------------------------------------------------------------------ quantization hooks


@pytest.mark.skipif("fut.wait()[0]" in inspect.getsource(quantization_hooks), reason="with torch's class they fail")
@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_torchs_quantization_hooks(ranks: Any, name: str) -> None:
    ranks(2).run(play, _train, getattr(quantization_hooks, name))


# ------------------------------------------------------------------ hooks of a group


@on_ranks(2)
@needs("register_pre_hook", "register_post_hook")
def test_hooks_of_the_group_see_the_same_reductions(rank: int) -> None:
    """The rebuild is one broadcast, of the order and the strides; torch also sends the buckets' sizes."""
    group = dist.new_group()
    seen: list[str] = []
    group.register_pre_hook(1, lambda call: seen.append(f"{call.name} of {call.input_tensors[0].numel()}"))
    group.register_post_hook(1, lambda call: seen.append(f"{call.name} returned"))
    both = []
    for make in (TorchDDP, lambda *a, **k: minddp.DistributedDataParallel(*a, **k, transport="process_group")):
        torch.manual_seed(0)
        ddp = make(nn.Linear(6, 5), process_group=group)
        seen.clear()
        for step in range(3):
            ddp(random(4, 6, rank=rank, step=step)).sum().backward()
        both.append(list(seen))
    dist.destroy_process_group(group)
    theirs, ours = both
    reductions = ["HookOpName.ALLREDUCE of 35"] * 3
    assert [call for call in theirs if "ALLREDUCE of" in call] == reductions
    assert [call for call in ours if "ALLREDUCE of" in call] == reductions
    assert ours[2:4] == ["HookOpName.BROADCAST of 5", "HookOpName.BROADCAST returned"]


# ------------------------------------------------------------------ groups that are reconfigured


def _reconfigured(rank: int, folder: str) -> list[Trail]:
    """Three ranks train, then ranks 0 and 2 alone, over one group object that gets other peers."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, enable_reconfigure=True)
    table = dist.FileStore(f"{folder}/handles", -1)
    trails = []
    for uuid, members in enumerate([[0, 1, 2], [0, 2]], start=1):
        if rank not in members:
            break
        table.set(f"{uuid} {rank}", dist._get_reconfigure_handle())
        handles = [table.get(f"{uuid} {member}").decode() for member in members]
        dist._reconfigure(uuid=uuid, handles=handles, timeout=timedelta(seconds=60)).wait()
        here = dist.get_rank()
        assert (here, dist.get_world_size()) == (members.index(rank), len(members))
        ours = {"transport": "process_group"}
        trails.append(_train(lambda *a, **k: minddp.DistributedDataParallel(*a, **k, **ours), here))
        assert_same(_train(TorchDDP, here), trails[-1], f"{members}, rank {here}")
    return trails


@needs("reconfigure")
def test_a_group_that_was_reconfigured_is_wrapped_anew(tmp_path: Path) -> None:
    pool = RankPool(3)
    try:
        first, left, last = pool.run(_reconfigured, str(tmp_path))
    finally:
        pool.kill()
    assert [len(first), len(left), len(last)] == [2, 1, 2]


# ------------------------------------------------------------------ backends that packages bring

_MODULE = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    made.append(rank)
    return dist.ProcessGroupGloo(store, rank, size, timeout)

def register():
    dist.Backend.register_backend("brought", create, devices=["cpu"])

made = []
"""


def _over_a_backend_of_a_package(rank: int, folder: str) -> bool:
    sys.path.insert(0, folder)
    try:
        group = dist.new_group(backend="brought")
        trails = [_train(make, rank, process_group=group) for make in (TorchDDP, minddp.DistributedDataParallel)]
        assert_same(*trails, f"rank {rank}")
        dist.destroy_process_group(group)
        return sys.modules["brought_backend"].made == [rank]
    finally:
        sys.path.remove(folder)


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"), reason="this torch looks for no entry points"
)
def test_a_backend_from_an_entry_point(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "brought_backend.py").write_text(_MODULE)
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.distributed.backends]\nbrought = brought_backend:register\n")
    assert ranks(3).run(_over_a_backend_of_a_package, str(tmp_path)) == [True] * 3


@on_ranks(2)
@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"), reason="this torch looks for no entry points"
)
def test_torch_finds_the_backend_by_its_entry_point(rank: int) -> None:
    for name in ("MINDDP", "minddp"):
        dist.Backend._plugins.pop(name, None)
    if hasattr(dist.Backend, "MINDDP"):
        del dist.Backend.MINDDP
    group = dist.new_group(backend="minddp")
    assert group.shares_memory
    dist.destroy_process_group(group)
