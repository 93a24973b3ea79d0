"""Buffers: the tensors of a module besides its parameters, such as running means.

They are not averaged. Rank 0's are broadcast at construction and, unless a hook is registered, before each forward
that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from minddp.replicas.broadcast import broadcast_coalesced
from minddp.transport.protocols import Transport


class BufferHook(NamedTuple):
    """Synchronises buffers in place of the broadcast: `function(state, {name: buffer})`."""

    state: Any
    function: Callable[[Any, dict[str, torch.Tensor]], Any]
    after_forward: bool


class Buffers:
    """The buffers of a module except those in `ignored`, by name."""

    def __init__(self, module: nn.Module, ignored: Collection[str]):
        self._module = module
        self._ignored = ignored
        self.hook: BufferHook | None = None
        self.named: dict[str, torch.Tensor] = {}
        self.collect()

    def collect(self) -> None:
        """Update `named`: modules may have assigned new tensors, or have other submodules."""
        self.named = {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self.named.values())

    def synchronize(self, transport: Transport, source: int) -> list[torch.futures.Future]:
        """Call the hook, or broadcast the buffers of rank `source`. Returns futures to wait for."""
        self.collect()
        tensors = self.tensors
        # As in torch, autograd must not notice that the buffers were overwritten.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            if self.hook is not None:
                return list(self.hook.function(self.hook.state, self.named) or ())
            broadcast_coalesced(transport, tensors, source)
            return []
