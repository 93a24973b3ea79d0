"""The scripts that run on the simulated device and on the plain CPU: one for each way to use the wrapper.

A `Mode` says how a model is wrapped, what a step is, and which waits of the host are documented.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import _apply_optimizer_in_backward  # compiles, so not on the simulated device
from torch.nn.parallel.distributed import _MixedPrecision

import minddp
from minddp import ddp as wrapper
from minddp.comm_hooks import HOOKS
from minddp.xray import XRay
from tests.simulated_device.device import SimulatedDevice, Stream
from tests.simulated_device.installed import simulated_device
from tests.simulated_device.operations import on_device

WIDTH = 16


class Network(nn.Module):
    """A chain of layers. Some use only every second `side`, some interrupt their backward."""

    def __init__(self, *, normalizes: bool, branches: bool, rank: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH) if normalizes else nn.LayerNorm(WIDTH)
        self.sides = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) if branches else None
        self.rank, self.turn, self.is_interrupted = rank, 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(self.norm(x)))
            if place == 2 and self.is_interrupted:
                x.register_hook(_interrupt)
        if self.sides is not None:
            x = x + self.sides[(self.rank + self.turn) % 2](x)
        self.turn += 1
        return x


class Interrupted(Exception):
    """Raised in the middle of a backward."""


def _interrupt(_grad: torch.Tensor) -> None:
    raise Interrupted


class Training:
    """One rank's training. `device` is `None` on the plain CPU."""

    def __init__(self, mode: Mode, transport: str, rank: int, device: SimulatedDevice | None, wrapper: Any):
        torch.manual_seed(0)
        self.device, self.rank, self.turn = device, rank, 0
        self.module = Network(normalizes=mode.normalizes, branches=mode.branches, rank=rank)
        self.module.to(torch.device("cpu"))  # see [Note: host memory]
        options = mode.options(self.module) if callable(mode.options) else mode.options
        self._options = {"bucket_cap_mb": 0.002, **options}
        if wrapper is minddp.DistributedDataParallel:
            self._options = {"stuck_after_s": None, "transport": transport, **self._options}
        self._wrapper = wrapper
        self.wrap()
        self.optimizer = mode.make_optimizer(self.module.parameters())
        if device is not None:
            self.module.register_forward_pre_hook(lambda *_: device.forward_begins())
        mode.prepare(self)

    def wrap(self) -> None:
        self.ddp = self._wrapper(self.module, **self._options)

    def loss(self) -> torch.Tensor:
        """Of a forward on a batch of this rank's own."""
        self.turn += 1
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * self.turn + self.rank))
        return self.ddp(x).float().square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.over()

    def bits(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.module.state_dict().values()]

    def over(self) -> None:
        """The step is over, or given up: the host may wait until the next forward."""
        if self.device is not None:
            self.device.step_ends()


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


@dataclass(frozen=True)
class Mode:
    """`options` are those of the constructor, or make them of the module. `steps` steps are taken.

    `aside`: "all" happens on a stream of the user's own, or the "steps" do. `waits` are documented waits of the
    host, `known_errors` those of torch's own code and a documented one, as pieces of text. Up to `equal_up_to`
    ranks the bits are those of the plain CPU.
    """

    options: Any = field(default_factory=dict)
    prepare: Callable[[Training], object] = lambda _training: None
    step: Callable[[Training], object] = Training.step
    steps: int = 4
    normalizes: bool = False
    branches: bool = False
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    aside: str = ""
    waits: tuple[str, ...] = ()
    known_errors: tuple[str, ...] = ()
    equal_up_to: int = 3


# ---------------------------------------------------------------------- what the modes do


def _hooked(hook: Callable[..., Any], make_state: Callable[[], Any] = lambda: None, **fields: Any) -> Mode:
    return Mode(prepare=lambda training: training.ddp.register_comm_hook(make_state(), hook), **fields)


def _register(name: str, training: Training) -> None:
    make_state, hook = HOOKS[name]
    training.ddp.register_comm_hook(make_state(training.module), hook)


def _power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def mean_of_halves(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sends another tensor than the bucket, and gives back a third."""
    bucket.set_buffer(bucket.buffer().to(torch.float64) / 2)
    return (
        dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0].float())
    )


def _count_of_all(_state: object, buffers: dict[str, torch.Tensor]) -> list[Any]:
    """The number of batches of all ranks, which travels while backward runs."""
    [count] = (buffer for name, buffer in buffers.items() if name.endswith("num_batches_tracked"))
    work = dist.all_reduce(count.clone(), async_op=True)
    return [work.get_future().then(lambda future: count.copy_(future.value()[0]))]


def _weighed_step(training: Training) -> None:
    training.optimizer.zero_grad()
    is_early = training.turn % 2 == 0
    if is_early:
        training.ddp.weigh(1.0 + training.rank)
    loss = training.loss()
    if not is_early:
        training.ddp.weigh(float(training.rank))
    loss.backward()
    training.optimizer.step()


def _step_without_optimizer(training: Training) -> None:
    training.optimizer.zero_grad()
    training.loss().backward()


def _apply_in_backward(training: Training) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, training.module.parameters(), {"lr": 0.1, "foreach": True})


def _delays(module: Any) -> dict[str, Any]:
    """The last layer's gradients come first, and leave with those of the layer before."""
    later = [(f"layers.4.{name}", param) for name, param in module.layers[4].named_parameters()]
    return {"delay_all_reduce_named_params": later, "param_to_hook_all_reduce": module.layers[3].bias}


def _accumulating_step(training: Training) -> None:
    training.optimizer.zero_grad()
    with training.ddp.no_sync():
        training.loss().backward()
    training.loss().backward()
    training.optimizer.step()


def _interrupted(
    then: Callable[[Training], object] = lambda _training: None, *, set_to_none: bool = True
) -> Callable[[Training], None]:
    """Steps of which one is interrupted, with buckets on their way; then gradients are cleared."""

    def step(training: Training) -> None:
        training.module.is_interrupted = training.turn == 1
        try:
            training.step()
        except Interrupted:
            training.over()
            training.optimizer.zero_grad(set_to_none=set_to_none)
            then(training)

    return step


def _drop_and_wrap_anew(training: Training) -> None:
    del training.ddp
    gc.collect()
    training.wrap()


def _move(training: Training) -> None:
    """Without the comparison of plans: all groups share a stream here, so it would wait for the old collectives."""
    with mock.patch.object(wrapper, "are_equal_everywhere", return_value=True):
        training.ddp.move_to_group(dist.group.WORLD)


def _joined_steps(training: Training) -> None:
    with training.ddp.join():
        for _ in range(2 + training.rank):
            training.step()


def _zeroed_step(training: Training) -> None:
    """Gradients stay where they are, in the buckets."""
    training.optimizer.zero_grad(set_to_none=False)
    training.loss().backward()
    training.optimizer.step()


def _recorded_step(training: Training) -> None:
    with XRay(training.ddp) as recorded:
        training.step()
    assert training.rank > 0 or all(rank.events for rank in recorded.recording.ranks)


def _finalized_step(training: Training) -> None:
    training.ddp.require_manual_backward_finalization = True
    training.optimizer.zero_grad()
    training.loss().backward()
    training.ddp.finalize_backward()
    training.optimizer.step()


_VIEWS, _UNUSED, _STATIC = (
    {name: True} for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
)

MODES: dict[str, Mode] = {
    "default": Mode(),
    "views": Mode(_VIEWS),
    "views, resident": Mode(_VIEWS, step=_zeroed_step),
    "batched copy": Mode({"batched_grad_copy": True}),
    "unused, all used": Mode(_UNUSED),
    "unused": Mode(_UNUSED, branches=True, waits=("finish_exchange",)),
    "unused, views": Mode({**_UNUSED, **_VIEWS}, branches=True, waits=("finish_exchange",)),
    "static": Mode(_STATIC),
    "static, views": Mode({**_STATIC, **_VIEWS}),
    "fp16 hook": _hooked(default_hooks.fp16_compress_hook),
    "PowerSGD": _hooked(
        powerSGD_hook.powerSGD_hook,
        _power_sgd,
        options={"bucket_cap_mb": 1.0},  # in several buckets its callbacks call gloo in another order on each rank
        waits=("synchronize",),
        known_errors=("aten.sub.Tensor reads",),  # its `input_tensor_cp`, after the synchronize
    ),
    "own hook": _hooked(mean_of_halves),
    **{name: Mode(prepare=partial(_register, name)) for name in HOOKS},
    "mixed precision": Mode({"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)}),
    "mixed precision, no_sync": Mode(
        {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32)}, step=_accumulating_step
    ),
    "buffers": Mode(normalizes=True),
    "buffer hook": Mode(
        normalizes=True, prepare=lambda training: training.ddp.register_buffer_hook(None, _count_of_all)
    ),
    "weigh": Mode(step=_weighed_step, waits=("modes/divisor.py",)),
    "overlap_optimizer": Mode(
        prepare=lambda training: training.ddp.overlap_optimizer(training.optimizer),
        step=_step_without_optimizer,
        make_optimizer=partial(torch.optim.Adam, foreach=False),
    ),
    "optimizers in backward": Mode(prepare=_apply_in_backward, step=_step_without_optimizer),
    "delayed": Mode(_delays),
    "lazy buckets": Mode({"lazy_bucket_allocation": True}),
    "auto": Mode({"bucket_cap_mb": "auto"}, steps=28, equal_up_to=2),
    "no_sync": Mode(step=_accumulating_step),
    "no_sync, views": Mode(_VIEWS, step=_accumulating_step),
    "exception": Mode(step=_interrupted()),
    "exception, views": Mode(_VIEWS, step=_interrupted()),
    "exception, zeros": Mode(step=_interrupted(set_to_none=False)),
    # Documented: zeros may come before the sum that is still on its way.
    "exception, views, zeros": Mode(
        _VIEWS, step=_interrupted(set_to_none=False), known_errors=("_foreach_zero_",), equal_up_to=0
    ),
    "exception, buffer hook": Mode(
        normalizes=True,
        step=_interrupted(),
        prepare=lambda training: training.ddp.register_buffer_hook(None, _count_of_all),
    ),
    "exception, delayed": Mode(_delays, step=_interrupted()),
    "dropped in flight": Mode(step=_interrupted(_drop_and_wrap_anew)),
    "moved in flight": Mode(step=_interrupted(_move)),
    "moved in flight, views": Mode(_VIEWS, step=_interrupted(_move)),
    "moved in flight, delayed": Mode(_delays, step=_interrupted(_move)),
    "join": Mode(step=_joined_steps, steps=1, normalizes=True),
    "X-ray": Mode(step=_recorded_step),
    "watchdog": Mode({"stuck_after_s": 20.0}),
    "manual finalization": Mode(step=_finalized_step),
    "on a side stream": Mode(aside="all"),
    "on a side stream, views": Mode(_VIEWS, aside="all"),
    "wrapped elsewhere": Mode(aside="steps"),
    "wrapped elsewhere, views": Mode(_VIEWS, aside="steps"),
    "wrapped elsewhere, views, resident": Mode(_VIEWS, step=_zeroed_step, aside="steps"),
    "wrapped elsewhere, unused": Mode(_UNUSED, branches=True, aside="steps", waits=("finish_exchange",)),
    "wrapped elsewhere, fp16 hook": _hooked(default_hooks.fp16_compress_hook, aside="steps"),
    "wrapped elsewhere, weigh": Mode(step=_weighed_step, aside="steps", waits=("modes/divisor.py",)),
    "wrapped elsewhere, buffers": Mode(normalizes=True, aside="steps"),
}


# ---------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Outcome:
    """The bits of all parameters and buffers after the last step; what the device has noticed."""

    bits: list[torch.Tensor]
    errors: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()


def run_on_cpu(rank: int, name: str) -> Outcome:
    """One rank's part, without a device: what counts are the bits."""
    mode = MODES[name]
    training = Training(mode, "process_group", rank, None, minddp.DistributedDataParallel)
    for _ in range(mode.steps):
        mode.step(training)
    return Outcome(training.bits())


def run_on_device(rank: int, name: str, transport: str) -> Outcome:
    """One rank's part on the simulated device."""
    mode = MODES[name]
    with simulated_device() as device:
        default, side = device.current, Stream(device, "side")
        with device.on(side if mode.aside == "all" else default):
            training = Training(mode, transport, rank, device, minddp.DistributedDataParallel)
            engine = EngineStreams(training.module, device)
        with device.on(side if mode.aside else default):
            side.wait_stream(default)
            for _ in range(mode.steps):
                mode.step(training)
                training.over()
            bits = training.bits()
            default.wait_stream(side)  # a script does so before it drops what both have used
            del training, engine
    return Outcome(bits, tuple(device.errors), tuple(device.waits))


class EngineStreams:
    """The stream on which autograd's engine adds up a gradient: that on which the accumulator was made.

    It waits for the one that has made the gradient, and the caller's stream waits for it before backward ends.
    """

    def __init__(self, module: nn.Module, device: SimulatedDevice):
        self._device, self._made_on, self._callers = device, device.current, device.current
        self._accumulators = [get_gradient_edge(param).node for param in module.parameters()]
        for node in self._accumulators:
            node.register_prehook(self._enter)
            node.register_hook(self._leave)
        module.register_forward_hook(self._on_forward)

    def _on_forward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._begin)

    def _begin(self, _grad: torch.Tensor) -> None:
        wait = partial(self._device.current.wait_stream, self._made_on)
        Variable._execution_engine.queue_callback(wait)  # before the wrapper queues what it does at the end

    def _enter(self, grads: Any) -> None:
        self._callers = self._device.current
        self._made_on.wait_stream(self._callers)
        for grad in on_device(grads):
            self._device.memory_of(grad).kept_for.add(self._made_on)
        self._device.current = self._made_on

    def _leave(self, *_from_engine: object) -> None:
        self._device.current = self._callers
