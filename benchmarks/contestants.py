"""Who races: minddp, torch's DistributedDataParallel, other ways to the same weights, and the floors under all."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from benchmarks.workloads import Workload, batch_of, device_of, training_step
from minddp import DistributedDataParallel
from minddp.transport import open_transport
from reference.interface import DataParallel
from reference.ladder import rungs

SettingName = Literal["default", "views", "static", "batched", "views_static"]
TransportName = Literal["process_group", "shared_memory", "auto"]
OtherName = Literal["replicate", "naive", "flat", "overlapped", "bucketed", "automatic", "zero1"]
Step = Callable[[], object]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "views_static": {"gradient_as_bucket_view": True, "static_graph": True},
}

ALONE = "one rank alone"
FLOOR = "no wrapper"
BASELINE = "torch default"
AS_IT_COMES = "minddp default, auto"  #: what `minddp.DistributedDataParallel(model)` is


def unwrapped(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True)
class Contestant:
    """`wrap` makes of a model what is trained, `step` makes of that one training step.

    Its `heat` are those that it runs side by side with, and its time is given as a multiple of the `baseline`'s.
    `None` is that of what does not train: floors.
    """

    name: str
    heat: str
    baseline: str | None = None
    wrap: Callable[[nn.Module], nn.Module] = unwrapped
    step: Callable[[nn.Module, Workload, int], Step] = training_step
    transport: str = "process_group"
    takes_sparse_gradients: bool = True


def native(setting: str) -> str:
    """The name of torch's contestant at this setting."""
    return f"torch {setting}"


def candidate(setting: str, transport: str = "process_group") -> str:
    """The name of the contestant in minddp's seat at this setting."""
    return f"minddp {setting}" + ("" if transport == "process_group" else f", {transport.replace('_', ' ')}")


def wire(transport: str) -> str:
    """The name of the floor that is nothing but one all-reduce of all gradients."""
    return f"all-reduce only, {transport.replace('_', ' ')}"


def field(
    settings: Sequence[str], transports: Sequence[str], others: Sequence[str] = (), *, control: bool = False
) -> list[Contestant]:
    """All who race, those of a heat next to each other."""
    return [*floors(transports), *pairs(settings, transports, control=control), *map(other, others)]


def floors(transports: Sequence[str]) -> list[Contestant]:
    """What no wrapper can beat: its step without it, alone and beside the other ranks, and the mere all-reduce."""
    measured = [transport for transport in transports if transport != "auto"]
    return [
        Contestant(ALONE, "floors", step=step_of_rank_0),
        Contestant(FLOOR, "floors"),
        *(Contestant(wire(name), "floors", step=all_reduce_alone(name), transport=name) for name in measured),
    ]


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
            contestants.append(Contestant(name, setting, native(setting), wrap, transport=transport))
    return contestants


def other(name: str) -> Contestant:
    """One of the other ways to the same weights, each in a heat of its own beside nobody.

    `replicate` wraps a list of the parameters and so never sees which module wants sparse gradients; the rungs of
    the reference ladder have no room for them.
    """
    if name == "replicate":
        return Contestant("torch replicate", name, BASELINE, replicate, takes_sparse_gradients=False)
    if name == "zero1":
        return Contestant("DeepSpeed ZeRO-1", name, BASELINE, step=zero_step, takes_sparse_gradients=False)
    return Contestant(
        f"reference {name}",
        name,
        BASELINE,
        rungs(cap_bytes=25 * 2**20)[name],
        step_then_synchronize,
        takes_sparse_gradients=False,
    )


def heats(contestants: Sequence[Contestant]) -> list[list[str]]:
    """Names by heat, in order."""
    by_heat: dict[str, list[str]] = {}
    for contestant in contestants:
        by_heat.setdefault(contestant.heat, []).append(contestant.name)
    return list(by_heat.values())


def enter(contestants: Sequence[Contestant], model: nn.Module) -> dict[str, nn.Module]:
    """What each of them trains: its own copy of `model`, so that all start from the same weights. Collective."""
    return {contestant.name: contestant.wrap(copy.deepcopy(model)) for contestant in contestants}


def for_workload(contestants: Sequence[Contestant], task: Workload) -> list[Contestant]:
    """Those that can train it."""
    return [c for c in contestants if c.takes_sparse_gradients or not task.has_sparse_gradients]


# ------------------------------------------------------------------ who is there


def unknown_to_torch(settings: Sequence[str]) -> list[str]:
    """Those of `settings` that the installed torch has no option for (`batched_grad_copy` is young)."""
    known = inspect.signature(NativeDDP).parameters
    return [setting for setting in settings if not set(SETTINGS[setting]) <= set(known)]


def not_installed(others: Sequence[str]) -> list[str]:
    return [name for name in others if name == "zero1" and importlib.util.find_spec("deepspeed") is None]


# ------------------------------------------------------------------ wrappers


def wrapped_by(wrapper: Callable[..., nn.Module], options: Mapping[str, Any]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: wrapper(model, **options)


def minddp_over(transport: str) -> Callable[..., nn.Module]:
    return lambda model, **options: DistributedDataParallel(model, transport=transport, **options)


# ------------------------------------------------------------------ steps


def step_of_rank_0(model: nn.Module, task: Workload, rank: int) -> Step:
    """Rank 0 trains and the others sit still: what one rank does with the machine to itself."""
    return training_step(model, task, rank) if rank == 0 else lambda: None


def step_then_synchronize(ddp: nn.Module, task: Workload, rank: int) -> Step:
    """For the reference ladder; see its [Note: the explicit call]."""
    assert isinstance(ddp, DataParallel), "a rung of the ladder"
    return training_step(ddp, task, rank, after_backward=ddp.synchronize)


def all_reduce_alone(transport: str) -> Callable[[nn.Module, Workload, int], Step]:
    """As many bytes as there are gradients, in one message: what the transport can do at best."""

    def make(model: nn.Module, task: Workload, rank: int) -> Step:
        link = open_transport(transport, dist.distributed_c10d._get_default_group(), device_of(model))
        message = link.allocate(gradient_bytes(model, task, rank) // 4, torch.float32, device_of(model)).zero_()
        return lambda: link.all_reduce(message).wait()

    return make


def gradient_bytes(model: nn.Module, task: Workload, rank: int) -> int:
    """What one backward has to tell the other ranks. Clears the gradients."""
    inputs, targets = batch_of(task, rank, device_of(model))
    task.loss(model(inputs), targets).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    model.zero_grad(set_to_none=True)
    return sum(g._values().nbytes + g._indices().nbytes if g.is_sparse else g.nbytes for g in grads)


def zero_step(model: nn.Module, task: Workload, rank: int) -> Step:
    """DeepSpeed's engine takes over backward and the update. It looks for the ranks in the environment."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.setdefault("DS_ACCELERATOR", device_of(model).type)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # in every step
    import deepspeed

    inputs, targets = batch_of(task, rank, device_of(model))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=task.learning_rate),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": len(inputs),
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step() -> None:
        engine.backward(task.loss(engine(inputs), targets))
        engine.step()

    return step
