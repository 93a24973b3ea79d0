"""Parameters whose all-reduce waits for a trigger: delay_all_reduce_named_params, param_to_hook_all_reduce.

For gradients that become ready in an unfavorable order, such as those of large embeddings. The caller names one
parameter as the trigger. When its gradient is ready, one all-reduce of one flat buffer averages the delayed ones.
Their `.grad`s are always views of that buffer, so nothing is packed. Bucket options and communication hooks do not
apply to them.

In a synchronised backward the all-reduce is launched just before that of the bucket with the trigger, even if this
rank does not use the trigger: ranks that use different parameters keep to one order. See [Note: launch order].

As in torch, the buffer is divided by the number of ranks, also under `no_sync`: averages of earlier backward
passes are equal on all ranks, and averaging them again does not change them. Unlike in torch, the end of
backward waits for the all-reduce, and a gradient that arrives too late, or is never reduced, is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from minddp.core import autograd
from minddp.core.backward_end import AwaitedEnds
from minddp.core.bucket import Bucket
from minddp.core.mode import Mode
from minddp.core.optimizer_steps import StepWatcher, steps_on
from minddp.options import Options, exclude
from minddp.transport.protocols import Transport, Work


def delayed_parameters(
    module: nn.Module,
    named_params: Sequence[tuple[str, nn.Parameter]] | None,
    trigger: nn.Parameter | None,
    options: Options,
    mixed_precision: object,
) -> dict[str, nn.Parameter]:
    """The parameters to delay, by name; usually none.

    Raises:
        ValueError: one argument without the other; parameters that are not the module's, have several dtypes or
            devices, or include the trigger; or an option that is incompatible with delayed all-reduce.
    """
    if (named_params is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: the "
            "gradient of the second starts the all-reduce of the first."
        )
    delayed = dict(named_params or ())
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, param in delayed.items():
        if known.get(name) is not param:
            raise ValueError(f"delay_all_reduce_named_params: the module has no such parameter `{name}`.")
        if param is trigger:
            raise ValueError(f"`{name}` is `param_to_hook_all_reduce`, and so cannot be delayed itself.")
    kinds = {(param.dtype, param.device): name for name, param in delayed.items()}
    if len(kinds) > 1:
        listed = ", ".join(f"`{name}` is {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise ValueError(f"The parameters in `delay_all_reduce_named_params` share one buffer, but {listed}.")
    if delayed:
        exclude("`delay_all_reduce_named_params`", {"`mixed_precision`": mixed_precision is not None})
    return delayed


def names_of(module: nn.Module, delayed: Iterable[nn.Parameter]) -> set[str]:
    """All names of these parameters. A tied one must not be reduced again under another name."""
    params = set(delayed)
    return {name for name, param in module.named_parameters(remove_duplicate=False) if param in params}


class DelayedAllReduce(StepWatcher, Mode):
    """One flat buffer for the gradients of `named_params`, reduced after the gradient of `trigger` has arrived.

    A mode of the reducer if the trigger has a bucket.
    """

    def __init__(self, named_params: Mapping[str, nn.Parameter], trigger: nn.Parameter, transport: Transport):
        self.params = list(named_params.values())
        self._transport = transport
        self._allocate()
        self._arrived: list[str] = []  # the parameters whose gradients have arrived, and are not reduced yet
        self._in_flight: Work | None = None
        self._trigger = trigger
        self._awaits_bucket = False  # the reduction is launched with the trigger's bucket
        self._is_late = False  # for further gradients: that of the trigger has arrived
        self._ends = AwaitedEnds(self._on_backward_end)
        self.watch_steps()
        hooked = {name: param for name, param in named_params.items() if param.requires_grad}
        self._hooked_names = list(hooked)
        # Parameters outlive their wrapper, so the hooks reference it weakly.
        hooks = autograd.GradientHooks(list(hooked.values()), autograd.weakly(self._on_arrival))
        handle = trigger.register_hook(autograd.weakly(self._on_trigger))
        weakref.finalize(self, hooks.remove).atexit = False
        weakref.finalize(self, handle.remove).atexit = False

    def _allocate(self) -> None:
        sizes = [param.numel() for param in self.params]
        self._buffer = torch.zeros(sum(sizes), dtype=self.params[0].dtype, device=self.params[0].device)
        pieces = zip(self._buffer.split(sizes), self.params, strict=True)
        self._views = [piece.view(param.shape) for piece, param in pieces]

    def has_trigger_in(self, params: Sequence[nn.Parameter]) -> bool:
        return any(param is self._trigger for param in params)

    def change_ranks(self, transport: Transport) -> None:
        """Switch to another process group."""
        self._transport = transport
        if self._in_flight is not None:  # the old ranks may still write into the buffer
            self._in_flight = None
            self._allocate()

    def provide_grads(self) -> None:
        """After each forward: set each `.grad` that is `None` to a view of zeros."""
        if self._in_flight is not None:  # an exception ended the last backward
            self._on_backward_end()
        self._ends.reset()
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is None:
                param.grad = view.zero_()

    # ------------------------------------------------------------------ during backward

    def _on_arrival(self, hook: int) -> None:
        name = self._hooked_names[hook]
        if self._is_late or self._in_flight is not None:
            raise RuntimeError(
                f"The gradient of `{name}` arrived after the all-reduce of the delayed parameters had begun. "
                f"Choose as `param_to_hook_all_reduce` a parameter that forward uses before all "
                f"`delay_all_reduce_named_params`, so that its gradient arrives last."
            )
        self._arrived.append(name)
        self._ends.queue_end_callback()

    def _on_trigger(self, _grad: torch.Tensor) -> None:
        if self._awaits_bucket:
            self._is_late = True
        else:
            self._reduce()

    def post_forward(self) -> None:
        self._awaits_bucket, self._is_late = True, False

    def before_launch(self, bucket: Bucket, contents: torch.Tensor) -> None:
        if self._awaits_bucket and self.has_trigger_in(bucket.params):
            self.post_backward()
            self._reduce()

    def post_backward(self) -> None:
        self._awaits_bucket = self._is_late = False

    def _reduce(self) -> None:
        with torch.no_grad():
            for param, view in zip(self.params, self._views, strict=True):
                if param.grad is None:
                    view.zero_()
                elif param.grad is not view:  # `.grad` was replaced after the forward
                    view.copy_(param.grad)
                param.grad = view
            self._buffer.div_(self._transport.world_size)
        self._in_flight = self._transport.all_reduce(self._buffer)
        self._arrived.clear()
        self._ends.queue_end_callback()

    def _on_backward_end(self, _backward: int = -1) -> None:
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See [Note: unfinished reduction]."""
        if self._arrived and not self._ends.is_any_awaited() and steps_on(optimizer, set(map(id, self.params))):
            raise RuntimeError(
                f"Gradients of delayed parameters are not averaged, because the gradient of "
                f"`param_to_hook_all_reduce` has not arrived: {', '.join(self._arrived)}. Use that parameter in "
                f"every loss that uses these."
            )
