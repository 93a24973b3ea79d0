"""The contestants and their race: minddp, torch's class, other ways to the same weights, and lower bounds."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.optim import SGD

from benchmarks.launch import DeviceName
from benchmarks.other_wrappers import sharded, step_of_deepspeed, step_of_torchft
from benchmarks.own_model import own_workload
from benchmarks.question import Options
from benchmarks.workloads import Step, Workload, WorkloadName, device_of, training_step, workload
from minddp import DistributedDataParallel
from minddp.transport import open_transport
from reference.interface import DataParallel
from reference.ladder import rungs

SettingName = Literal["default", "views", "static", "batched", "views_static", "find_unused"]
TransportName = Literal["process_group", "shared_memory", "auto"]
LadderName = Literal["naive", "flat", "overlapped", "bucketed", "automatic"]
OtherName = Literal["replicate", "fully_shard", "zero", "deepspeed_1", "deepspeed_2", "torchft", LadderName]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "views_static": {"gradient_as_bucket_view": True, "static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}

FLOOR = "no wrapper"
WAITING = "no wrapper, barrier"
BASELINE = "torch default"
BARRIER = "barrier"
AS_IT_COMES = "minddp default, auto"  #: `minddp.DistributedDataParallel(model)`
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
    transport: str = "process_group"
    takes_sparse_gradients: bool = True


@dataclass(frozen=True, kw_only=True)
class FieldOptions(Options):
    """Which contestants train which workloads."""

    workloads: tuple[WorkloadName, ...] = tuple(name for name in get_args(WorkloadName) if name != "short")
    settings: tuple[SettingName, ...] = ("default", "views", "static", "batched", "views_static")
    """Constructor options, given to both implementations alike."""
    model: str | None = None
    """A model of your own in place of the workloads: file.py:make or package.module:make. make() returns a module
    and a function loss(model), which returns a scalar."""
    others: tuple[OtherName, ...] = get_args(OtherName)
    """Other ways to train: torch's `replicate`, `fully_shard` and `ZeroRedundancyOptimizer`, DeepSpeed and torchft
    where they are installed, and the rungs of the reference ladder."""
    device: DeviceName = "cpu"
    """With "cuda", a GPU for each rank, and NCCL."""

    def tasks(self) -> list[Workload]:
        """The workloads to train. Collective where the model is the user's own."""
        if self.model is not None:
            return [own_workload(self.model)]
        return [workload(name, self.workload_size) for name in self.workloads]


def supported(settings: Sequence[SettingName]) -> tuple[SettingName, ...]:
    """Those of `settings` that the installed torch has options for; prints the others."""
    known = inspect.signature(NativeDDP).parameters.keys()
    unknown = [setting for setting in settings if not SETTINGS[setting].keys() <= known]
    if unknown:
        print(f"Left out, as torch {torch.__version__} has no such option: {', '.join(unknown)}.")
    return tuple(setting for setting in settings if setting not in unknown)


def available(others: Sequence[OtherName]) -> tuple[OtherName, ...]:
    """Those of `others` that can run here; prints the reason for each of the rest."""
    reasons: dict[str, str] = {name: reason for name in others if (reason := obstacle(name))}
    for name, reason in reasons.items() if os.environ.get("RANK", "0") == "0" else ():
        print(f"Left out: {name}, because {reason}.")
    return tuple(name for name in others if name not in reasons)


def obstacle(name: OtherName) -> str | None:
    """Why this one of the others cannot run here, if so."""
    package = name.partition("_")[0]
    try:
        if package in ("deepspeed", "torchft"):
            importlib.import_module(package)
    except ImportError as error:
        return f"{error}: pip install {package}"
    return None


def native(setting: str) -> str:
    """The name of torch's contestant at this setting."""
    return f"torch {setting}"


def candidate(setting: str, transport: str = "process_group") -> str:
    """The name of the contestant that takes minddp's place at this setting."""
    return f"minddp {setting}" + ("" if transport == "process_group" else f", {transport.replace('_', ' ')}")


def wire(transport: str) -> str:
    """The name of the floor that is nothing but one all-reduce of all gradients."""
    return f"all-reduce only, {transport.replace('_', ' ')}"


def floors(transports: Sequence[str]) -> list[Contestant]:
    """Lower bounds of any wrapper: the bare step, and the mere all-reduce."""
    measured = [transport for transport in transports if transport != "auto"]
    return [
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
    """One of the other ways to the same weights, alone in a heat of its own.

    `replicate` wraps a list of the parameters and so does not see which module wants sparse gradients; none of the
    others supports them.
    """
    contestant = partial(Contestant, heat=name, baseline=BASELINE, takes_sparse_gradients=False)
    if name == "replicate":
        return contestant("torch replicate", wrap=replicate)
    if name == "fully_shard":
        return contestant("torch fully_shard", wrap=sharded)
    if name == "zero":
        step_of_zero = partial(training_step, make_optimizer=partial(ZeroRedundancyOptimizer, optimizer_class=SGD))
        return contestant("torch ZeroRedundancyOptimizer", wrap=NativeDDP, step=step_of_zero)
    if name.startswith("deepspeed"):
        return contestant(f"DeepSpeed ZeRO-{name[-1]}", step=partial(step_of_deepspeed, int(name[-1])))
    if name == "torchft":
        return contestant("torchft DDP", step=step_of_torchft)
    rung, step = rungs(cap_bytes=25 * 2**20)[name], step_then_synchronize
    return contestant(f"reference {name}", wrap=rung, step=step)


def parts(transports: Sequence[str]) -> list[Contestant]:
    """The contestants of `split_of`: both wrappers with less and less to do, and a barrier without a wrapper."""
    wrappers = {native("default"): NativeDDP} | {candidate("default", t): minddp_over(t) for t in transports}
    field = [Contestant(WAITING, "parts", step=step_then_barrier)]
    for name, wrapper in wrappers.items():
        still: dict[str, Any] = {"broadcast_buffers": False}
        alone = still | ({} if wrapper is NativeDDP else {"on_drift": None})  # replicas drift where nothing is sent
        hooks = alone | {"gradient_as_bucket_view": True}
        field.append(Contestant(f"{name}, no buffers", "parts", wrap=wrapped_by(wrapper, still)))
        field.append(Contestant(f"{name}, nothing sent", "parts", wrap=silent(wrapped_by(wrapper, alone))))
        field.append(Contestant(f"{name}, hooks", "parts", wrap=silent(wrapped_by(wrapper, hooks))))
    return field


def on_ranks(
    kind: str,
    number: int,
    transports: Sequence[str],
    task: Workload,
    step_of: Callable[[nn.Module, Workload, int], Step] = training_step,
) -> list[Contestant]:
    """A heat on the first `number` ranks, the others idle: no wrapper, torch, minddp, a barrier. Collective."""
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

    barrier = Contestant(
        f"{kind} {BARRIER}, {number}",
        f"{kind} {number}",
        step=lambda model, task, rank: (lambda: dist.barrier(group)) if is_in else (lambda: None),
    )
    return [*(contestant(name, wrapper) for name, wrapper in wrappers.items()), barrier]


def for_workload(contestants: Sequence[Contestant], task: Workload) -> list[Contestant]:
    """The contestants that can train `task`."""
    return [c for c in contestants if c.takes_sparse_gradients or not task.has_sparse_gradients]


# ------------------------------------------------------------------ wrappers and steps


def wrapped_by(wrapper: Callable[..., nn.Module], options: Mapping[str, Any]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: wrapper(model, **options)


def minddp_over(transport: str) -> Callable[..., nn.Module]:
    return lambda model, **options: DistributedDataParallel(model, transport=transport, **options)


def silent(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """With a communication hook that sends nothing: only the gradients' hooks and copies remain."""

    def done(tensor: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    def wrapped(model: nn.Module) -> nn.Module:
        ddp: Any = wrap(model)
        ddp.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))
        return ddp

    return wrapped


def step_then_barrier(model: nn.Module, task: Workload, rank: int) -> Step:
    return training_step(model, task, rank, after_backward=dist.barrier)


def step_then_synchronize(ddp: nn.Module, task: Workload, rank: int) -> Step:
    """For the reference ladder; see its [Note: the explicit call]."""
    assert isinstance(ddp, DataParallel), "a rung of the ladder"
    return training_step(ddp, task, rank, after_backward=ddp.synchronize)


def all_reduce_alone(transport: str) -> Callable[[nn.Module, Workload, int], Step]:
    """One message of as many bytes as there are gradients: the transport at its best."""

    def make(model: nn.Module, task: Workload, rank: int) -> Step:
        link = open_transport(transport, dist.distributed_c10d._get_default_group(), device_of(model))
        message = link.allocate(gradient_bytes(model, task, rank) // 4, torch.float32, device_of(model)).zero_()
        return lambda: link.all_reduce(message).wait()

    return make


def gradient_bytes(model: nn.Module, task: Workload, rank: int) -> int:
    """The bytes that one backward has to send to the other ranks. Clears the gradients."""
    task.objective(rank, device_of(model))(model).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    sparse = [part for grad in grads if grad.is_sparse for part in (grad._values(), grad._indices())]
    model.zero_grad(set_to_none=True)
    return sum(tensor.nbytes for tensor in [*sparse, *(grad for grad in grads if not grad.is_sparse)])
