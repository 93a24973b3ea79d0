"""The part of the wrapper that keeps replicas equal outside of backward: parameters, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minddp.core.events import EventKind
from minddp.core.reducer import Reducer
from minddp.options import Options
from minddp.replicas import broadcast as replicas
from minddp.replicas.agreement import Replica, verify_replicas_agree
from minddp.replicas.buffers import BufferHook, Buffers
from minddp.replicas.optimizer_state import broadcast_optimizer_state, check_optimizer
from minddp.replicas.placement import reduced_parameters
from minddp.transport.protocols import Transport


class SynchronizedReplicas:
    """A base class of the wrapper. The attributes of the wrapper that it uses are declared here."""

    module: nn.Module
    device: torch.device
    process_group: dist.ProcessGroup
    parameters_to_ignore: Collection[str]
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    mixed_precision: Any
    extensions: Sequence[Any]
    _buffers_from: int
    _buffers_in_step: Buffers
    _delayed: Any
    _options: Options
    _reducer: Reducer
    _transport: Transport

    def _verify_that_ranks_agree(self, transport_kind: object, delayed: dict[str, nn.Parameter]) -> None:
        """Called before anything else is sent, with a transport that every rank has."""
        options, buffers, ignored = self._options, self._buffers_in_step.named, self.parameters_to_ignore
        travels = options.init_sync_buffers or options.forward_sync_buffers
        frozen = [(n, p) for n, p in self.module.named_parameters() if not (p.requires_grad or n in ignored)]
        ours = Replica.of(
            reduced_parameters(self.module, ignored),
            others=[*frozen, *delayed.items(), *(buffers.items() if travels else ())],
            ignored=ignored,
            options=options,
            transport=transport_kind if isinstance(transport_kind, str) else "of your own",
            broadcast_buffers=options.init_sync_buffers and bool(buffers),
            forward_sync_buffers=options.forward_sync_buffers and bool(buffers),
            mixed_precision=repr(self.mixed_precision),
            **{name: value for extension in self.extensions for name, value in extension.agreed().items()},
        )
        agreed = verify_replicas_agree(self._transport, ours, self.device)
        self._options = replace(options, caps=agreed.caps)

    def synchronize(
        self, source: int = 0, *, buffers: bool = True, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Overwrite parameters and buffers on every rank with those of rank `source`. Collective.

        With an `optimizer` also its state and hyperparameters, such as the learning rate, for instance when rank
        `source` alone has loaded a checkpoint. Other counters of steps, such as a learning rate scheduler's or a
        GradScaler's, are not sent: load them on every rank.

        Raises:
            TypeError, ValueError: not an optimizer whose state is equal on all ranks.
            RuntimeError: the ranks have other parameter groups, or state that cannot be sent. On every rank.
        """
        if optimizer is not None:
            check_optimizer(optimizer)
        params = [param for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore]
        params += self._delayed.params if self._delayed is not None else []
        state: list[torch.Tensor] = [*params]
        if buffers:
            self._buffers_in_step.collect()
            state += self._buffers_in_step.tensors
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, state, source)
        if optimizer is not None:
            broadcast_optimizer_state(self._transport, self.process_group, optimizer, params, source)

    # ------------------------------------------------------------------ buffers

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward begins or ends with a synchronization of the buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffers_in_step.named)

    def _synchronizes_buffers(self, *, after_forward: bool) -> bool:
        hook = self._buffers_in_step.hook
        if any(extension.synchronizes_buffers for extension in self.extensions):
            return False
        return self.will_sync_module_buffers() and after_forward == (hook is not None and hook.after_forward)

    def _synchronize_buffers(self) -> None:
        """Broadcast rank 0's buffers; under `join`, those of the highest rank that still has inputs."""
        self._reducer.events.emit(EventKind.BUFFERS_BEGIN)
        self._reducer.futures += self._buffers_in_step.synchronize(self._transport, self._buffers_from)
        self._reducer.events.emit(EventKind.BUFFERS_BROADCAST, len(self._buffers_in_step.named))

    def register_buffer_hook(
        self, state: Any, hook: Callable[[Any, dict[str, torch.Tensor]], Any], *, after_forward: bool = True
    ) -> None:
        """Let `hook(state, {name: buffer})` synchronize the buffers instead of a broadcast from rank 0.

        The end of backward waits for the futures that it returns.

        Raises:
            TypeError: not callable.
        """
        if not callable(hook):
            raise TypeError(f"A buffer hook must be callable, but is {hook!r}.")
        self._buffers_in_step.hook = BufferHook(state, hook, after_forward)

    @property
    def broadcast_buffers(self) -> bool:
        """The name before torch 2.13 of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value
