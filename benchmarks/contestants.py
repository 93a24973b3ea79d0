"""The contestants and their race: minddp, torch's class, other ways to the same weights, and lower bounds."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.optim import SGD

from benchmarks.launch import DeviceName
from benchmarks.question import RaceOptions
from benchmarks.workloads import Step, Workload, training_step
from minddp import DistributedDataParallel

SettingName = Literal["default", "views", "static", "batched", "views_static", "find_unused"]
TransportName = Literal["process_group", "shared_memory", "nccl", "auto"]
Transports = Annotated[tuple[TransportName, ...], tyro.conf.arg(aliases=["--transport"])]
OtherName = Literal["ddp_over_minddp", "fully_shard", "fully_shard_over_minddp", "zero"]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "views_static": {"gradient_as_bucket_view": True, "static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}

FLOOR = "no wrapper"
BASELINE = "torch default"
AS_IT_COMES = "minddp default, auto"  #: `minddp.DistributedDataParallel(model)`
NATIVE_OVER_MINDDP = "torch default, backend minddp"
FULLY_SHARD = "torch fully_shard"
STEPS_UNTIL_TUNED = 32  # minddp.tools.forecast observes 11 steps before it changes the buckets and 11 after


@dataclass(frozen=True)
class Contestant:
    """`wrap` makes of a model the module that is trained, `step` makes of that one training step.

    The contestants of one `heat` run back to back, and a time is given as a multiple of the `baseline`'s; a floor
    has none, as it does not train.
    """

    name: str
    heat: str
    baseline: str | None = None
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    step: Callable[[nn.Module, Workload, int], Step] = training_step
    takes_sparse_gradients: bool = True
    needs_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class RanksOptions(RaceOptions):
    """The options of a race of several numbers of ranks."""

    ranks: tuple[int, ...]
    """Numbers of ranks. Under torchrun, at most as many as it has started."""
    transports: Transports = ("process_group", "auto")
    world_size: tyro.conf.Suppress[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", self.world_size or max(self.ranks, default=1))
        super().__post_init__()
        if not self.ranks or min(self.ranks) < 1 or max(self.ranks) > self.world_size:
            raise ValueError(
                f"ranks is {self.ranks}; give numbers from 1 to {self.world_size}, the ranks there are."
            )


def supported(settings: Sequence[SettingName]) -> tuple[SettingName, ...]:
    """Those of `settings` that the installed torch has options for; prints the others."""
    known = inspect.signature(NativeDDP).parameters.keys()
    unknown = [setting for setting in settings if not SETTINGS[setting].keys() <= known]
    if unknown:
        print(f"Left out, as torch {torch.__version__} has no such option: {', '.join(unknown)}.")
    return tuple(setting for setting in settings if setting not in unknown)


def native(setting: str) -> str:
    """The name of torch's contestant at this setting."""
    return f"torch {setting}"


def candidate(setting: str, transport: str = "process_group") -> str:
    """The name of the contestant that takes minddp's place at this setting."""
    return f"minddp {setting}" + ("" if transport == "process_group" else f", {transport.replace('_', ' ')}")


def pairs(settings: Sequence[str], transports: Sequence[str], *, control: bool = False) -> list[Contestant]:
    """At each setting torch, then minddp by each transport.

    "auto" becomes one of the others, so it only has to show, at the first setting, that choosing costs nothing.
    """
    contestants = []
    for setting in settings:
        options = SETTINGS[setting]
        contestants.append(Contestant(native(setting), setting, native(setting), wrapped_by(NativeDDP, options)))
        for transport in transports:
            if transport == "auto" and setting != settings[0]:
                continue
            wrap = wrapped_by(NativeDDP, options) if control else wrapped_by(minddp_over(transport), options)
            name = candidate(setting, transport)
            contestants.append(Contestant(name, setting, native(setting), wrap))
    return contestants


def other(name: OtherName) -> Contestant:
    """One of the other ways to the same weights. FSDP2 and ZeRO have no sparse gradients."""
    if name == "ddp_over_minddp":
        return Contestant(NATIVE_OVER_MINDDP, "default", BASELINE, native_over_minddp, needs_cpu=True)
    dense = partial(Contestant, takes_sparse_gradients=False)
    if name == "fully_shard":
        return dense(FULLY_SHARD, "fully_shard", BASELINE, sharded)
    if name == "fully_shard_over_minddp":
        over = f"{FULLY_SHARD}, backend minddp"
        return dense(over, "fully_shard", FULLY_SHARD, sharded_over_minddp, needs_cpu=True)
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=SGD)
    return dense("torch zero", name, BASELINE, NativeDDP, partial(training_step, make_optimizer=zero))


def on_ranks(
    kind: str,
    number: int,
    transports: Sequence[str],
    task: Workload,
    step_of: Callable[[nn.Module, Workload, int], Step] = training_step,
) -> list[Contestant]:
    """A heat on the first `number` ranks, the others idle: no wrapper, torch, minddp. Collective."""
    group = dist.new_group(range(number))
    is_in = dist.get_rank() < number
    wrappers: dict[str, Any] = {FLOOR: lambda model, process_group: model, BASELINE: NativeDDP}
    wrappers |= {candidate("default", transport): minddp_over(transport) for transport in transports}

    def step(model: nn.Module, _: Workload, rank: int) -> Step:
        return step_of(model, task, rank) if is_in else lambda: None

    def contestant(name: str, wrapper: Any) -> Contestant:
        def wrap(model: nn.Module) -> nn.Module:
            local = min(number, int(os.environ.get("LOCAL_WORLD_SIZE", number)))
            with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local)):  # as if there were no others
                return wrapper(model, process_group=group) if is_in else nn.Identity()

        return Contestant(f"{kind} {name}, {number}", f"{kind} {number}", wrap=wrap, step=step)

    return [contestant(name, wrapper) for name, wrapper in wrappers.items()]


def able(contestants: Sequence[Contestant], task: Workload, device: DeviceName = "cpu") -> list[Contestant]:
    """The contestants that can train `task` on this device."""
    on_device = [c for c in contestants if device == "cpu" or not c.needs_cpu]
    return [c for c in on_device if c.takes_sparse_gradients or not task.has_sparse_gradients]


# ------------------------------------------------------------------ wrappers and steps


def wrapped_by(wrapper: Callable[..., nn.Module], options: Mapping[str, Any]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: wrapper(model, **options)


def minddp_over(transport: str) -> Callable[..., nn.Module]:
    return lambda model, **options: DistributedDataParallel(model, transport=transport, **options)


def settled_step(model: nn.Module, task: Workload, rank: int) -> Step:
    """A training step, taken until `bucket_cap_mb="auto"` has settled the buckets. Collective."""
    step = training_step(model, task, rank)
    for _ in range(STEPS_UNTIL_TUNED):
        step()
    return step


def native_over_minddp(model: nn.Module) -> nn.Module:
    return NativeDDP(model, process_group=dist.new_group(backend="minddp"))


def sharded(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """FSDP2, with a unit of its own for each child of at least 1 MiB."""
    for child in model.children():
        if sum(p.nbytes for p in child.parameters()) >= 2**20 and not isinstance(child, nn.ModuleList):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_over_minddp(model: nn.Module) -> nn.Module:
    return sharded(model, DeviceMesh.from_group(dist.new_group(backend="minddp"), "cpu"))


def whole(param: Tensor) -> Tensor:
    """All of a parameter that is spread over the ranks. Collective."""
    return param.full_tensor() if isinstance(param, DTensor) else param
