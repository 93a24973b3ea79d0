"""The seams by which a tool attaches to a wrapper that does not know it.

What happens within a backward has its own seam, `core/mode.py`: an extension appends a mode in `attach`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from minddp.transport.protocols import Transport

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel


class Extension:
    """Called by the wrapper `ddp`, in the order of these methods. Each does nothing unless overridden.

    A dataclass is pickled with its arguments alone; a copy of the wrapper attaches it anew.
    """

    #: True if the extension broadcasts buffers itself, so that the wrapper does not.
    synchronizes_buffers = False

    def agreed(self) -> Mapping[str, object]:
        """Options that must be equal on all ranks, by name."""
        return {}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise `ValueError` if these arguments of the constructor exclude the extension."""

    def wrap_transport(self, transport: Transport, ddp: DistributedDataParallel) -> Transport:
        """The transport to use in the place of `transport`. Called before `ddp` is constructed, too."""
        return transport

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        """`ddp` is constructed, or is a copy. `starts_equal`: all ranks have just been given rank 0's weights."""

    def change_ranks(self, ddp: DistributedDataParallel) -> None:
        """`ddp` goes on with the ranks of another group."""

    def pre_forward(self, ddp: DistributedDataParallel) -> None:
        """A forward with gradients begins; nothing has been checked or sent."""

    def before_module(
        self, ddp: DistributedDataParallel, broadcast: Mapping[str, torch.Tensor], inputs: Any, kwargs: Any
    ) -> None:
        """The module is about to run, with gradients. `broadcast`: the buffers that rank 0 has just sent."""

    def post_forward(self, ddp: DistributedDataParallel) -> None:
        """The module has run, with gradients."""

    def __getstate__(self) -> dict[str, Any]:
        if not is_dataclass(self):
            return vars(self)
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if is_dataclass(self):
            vars(self).update({one.name: None for one in fields(self) if not one.init})
        vars(self).update(state)
