"""Buffers: what a module keeps beside its parameters, such as running means. Kept equal by broadcast.

Nothing averages them: rank 0's are broadcast at construction and, without a hook, before each forward that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from minddp.replicas import broadcast as replicas
from minddp.replicas.module_watch import are_same
from minddp.transport.protocols import Transport

KEPT_BYTES = 4 * 1024 * 1024


class BufferHook(NamedTuple):
    """Synchronises buffers in its own way: `function(state, {name: buffer})`. See `register_buffer_hook`."""

    state: Any
    function: Callable[[Any, dict[str, torch.Tensor]], Any]
    after_forward: bool


class Buffers:
    """The buffers of a module but those in `ignored`, by name."""

    def __init__(self, module: nn.Module, ignored: Collection[str]):
        self._module = module
        self._ignored = ignored
        self.hook: BufferHook | None = None
        self.named: dict[str, torch.Tensor] = {}
        self._places: list[tuple[nn.Module, Sequence[object]]] = []
        self._coalesced: replicas.CoalescedBroadcast | None = None
        self.collect()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coalesced": None}  # memory of its own, not the module's

    def collect(self) -> None:
        """Look again what there is: modules may have assigned new tensors, or have other submodules."""
        if self._places and all(are_same(_members(submodule), before) for submodule, before in self._places):
            return
        self.named = {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}
        self._places = [(submodule, _members(submodule)) for submodule in self._module.modules()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self.named.values())

    def synchronize(self, transport: Transport, source: int) -> list[torch.futures.Future]:
        """Make them those of rank `source`, or have the hook do what it does. Returns futures to wait for."""
        self.collect()
        # Autograd must not take the overwritten buffers for modified: as torch.
        tensors = self.tensors
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            if self.hook is not None:
                return list(self.hook.function(self.hook.state, self.named) or ())
            coalesced = self._coalesced  # of the step before; its memory is kept if it is not much
            if coalesced is None or not coalesced.is_of(tensors):
                coalesced = replicas.CoalescedBroadcast(tensors)
                self._coalesced = coalesced if coalesced.nbytes <= KEPT_BYTES else None
            coalesced.broadcast(transport, source)
            return []


def _members(submodule: nn.Module) -> Sequence[object]:
    """Its submodules and buffers. Names would take five times as long to compare."""
    return (*submodule._modules.values(), *submodule._buffers.values())
