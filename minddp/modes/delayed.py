"""Parameters whose all-reduce waits for a trigger: delay_all_reduce_named_params, param_to_hook_all_reduce.

For gradients that arrive in an awkward order, such as large embeddings, the caller names one parameter, and when
*its* gradient arrives the others' leave, in one all-reduce of one buffer. Their `.grad`s are views of that buffer
all the time, so there is nothing to pack; bucket options and communication hooks do not apply to them.

As torch, the buffer is truly divided by the number of ranks, also under `no_sync`: what has been reduced already
is equal everywhere, and dividing and summing it again leaves it as it is. Unlike torch, the end of backward waits
for the all-reduce, a gradient that has been put elsewhere is fetched back, and one that comes too late, or is
never triggered, is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from minddp.core import autograd
from minddp.core.backward_end import AwaitedEnds
from minddp.core.optimizer_steps import StepWatcher, steps_on
from minddp.options import Options, exclude
from minddp.replicas import broadcast as replicas
from minddp.transport.protocols import Transport, Work


def delayed_parameters(
    module: nn.Module,
    named_params: Sequence[tuple[str, nn.Parameter]] | None,
    trigger: nn.Parameter | None,
    options: Options,
    mixed_precision: object,
) -> dict[str, nn.Parameter]:
    """What the constructor is asked to delay, by name. Usually nothing.

    Raises:
        ValueError: one argument without the other, parameters that are not the module's, of several dtypes or
            devices, or the trigger itself, or an option that a truly divided buffer does not follow.
    """
    if (named_params is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: the "
            "gradient of the one lets those of the others leave."
        )
    delayed = dict(named_params or ())
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, param in delayed.items():
        if known.get(name) is not param:
            raise ValueError(f"delay_all_reduce_named_params: the module has no such parameter `{name}`.")
        if param is trigger:
            raise ValueError(
                f"`{name}` is both `param_to_hook_all_reduce` and one of `delay_all_reduce_named_params`: its own "
                f"gradient would come too late."
            )
    kinds = {(param.dtype, param.device): name for name, param in delayed.items()}
    if len(kinds) > 1:
        listed = ", ".join(f"`{name}` is {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise ValueError(f"The parameters in `delay_all_reduce_named_params` travel in one buffer, but {listed}.")
    others = {
        "`mixed_precision`": mixed_precision is not None,
        "`reduction`": options.reduction != "mean",
    }
    if delayed:
        exclude("`delay_all_reduce_named_params`", others)
    return delayed


def names_of(module: nn.Module, delayed: Iterable[nn.Parameter]) -> set[str]:
    """All names of these parameters: under another name a tied one must not be reduced once more."""
    params = set(delayed)
    return {name for name, param in module.named_parameters(remove_duplicate=False) if param in params}


class DelayedAllReduce(StepWatcher):
    """One flat buffer for the gradients of `named_params`, reduced when the gradient of `trigger` arrives."""

    def __init__(self, named_params: Mapping[str, nn.Parameter], trigger: nn.Parameter, transport: Transport):
        self.params = list(named_params.values())
        self._transport = transport
        self._take_memory()
        self._arrived: list[str] = []  # since the trigger
        self._under_way: Work | None = None
        self._ends = AwaitedEnds(self._on_backward_end)
        self.watch_steps()
        self._install_hooks(named_params, trigger)

    def _take_memory(self) -> None:
        """A new buffer, the old one being left to whatever still refers to it."""
        sizes = [param.numel() for param in self.params]
        self._buffer = torch.zeros(sum(sizes), dtype=self.params[0].dtype, device=self.params[0].device)
        pieces = zip(self._buffer.split(sizes), self.params, strict=True)
        self._views = [piece.view(param.shape) for piece, param in pieces]

    def broadcast(self, source: int) -> None:
        """Overwrite the parameters on every rank with those of rank `source`. Collective."""
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, self.params, source)

    def change_ranks(self, transport: Transport) -> None:
        """Go on with other ranks."""
        self._transport = transport
        if self._under_way is not None:  # the old ranks may yet write into it
            self._under_way = None
            self._take_memory()

    def provide_grads(self) -> None:
        """After each forward: parameters whose `.grad` was dropped get a view of zeros."""
        if self._under_way is not None:  # an exception has ended the last backward before its end was called
            self._on_backward_end()
        self._ends.reset()
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is None:
                param.grad = view.zero_()

    # ------------------------------------------------------------------ during backward

    def _install_hooks(self, named_params: Mapping[str, nn.Parameter], trigger: nn.Parameter) -> None:
        """Parameters outlive their wrapper, so hooks refer to it weakly."""
        hooked = {name: param for name, param in named_params.items() if param.requires_grad}
        self._hooked_names = list(hooked)
        hooks = autograd.GradientHooks(list(hooked.values()), autograd.weakly(self._on_arrival))
        reduce = autograd.weakly(self._reduce)
        handle = trigger.register_hook(lambda _grad: reduce())
        weakref.finalize(self, hooks.remove).atexit = False
        weakref.finalize(self, handle.remove).atexit = False

    def _on_arrival(self, hook: int) -> None:
        name = self._hooked_names[hook]
        if self._under_way is not None:
            raise RuntimeError(
                f"The gradient of `{name}` has arrived when the all-reduce of the delayed parameters was under way "
                f"already. Let `param_to_hook_all_reduce` be a parameter whose gradient arrives after those of all "
                f"`delay_all_reduce_named_params`, one that forward uses before them."
            )
        self._arrived.append(name)
        self._ends.await_end()

    def _reduce(self) -> None:
        """The gradient of the trigger has arrived."""
        with torch.no_grad():
            for param, view in zip(self.params, self._views, strict=True):
                if param.grad is None:
                    view.zero_()
                elif param.grad is not view:  # `.grad` was replaced after the forward
                    view.copy_(param.grad)
                param.grad = view
            self._buffer.div_(self._transport.world_size)
        self._under_way = self._transport.all_reduce(self._buffer)
        self._arrived.clear()
        self._ends.await_end()

    def _on_backward_end(self, _backward: int = -1) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See [Note: unfinished reduction]."""
        if self._arrived and not self._ends.is_any_awaited() and steps_on(optimizer, set(map(id, self.params))):
            raise RuntimeError(
                f"Gradients of delayed parameters have arrived, but not the gradient of "
                f"`param_to_hook_all_reduce`, so they are not reduced: {', '.join(self._arrived)}. Every loss that "
                f"uses them must use it, too."
            )
