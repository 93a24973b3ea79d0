"""The interface by which a tool attaches to a wrapper.

To act within a backward, an extension appends a mode (`core/mode.py`) to the reducer in `attach`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from minddp.transport.protocols import Transport

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel


class Extension:
    """The wrapper `ddp` calls these methods, in this order. Each does nothing unless overridden.

    Of a dataclass only the arguments are pickled; a copy of the wrapper attaches it again.
    """

    #: True if the extension broadcasts buffers itself, so that the wrapper does not.
    synchronizes_buffers = False

    def agreed(self) -> Mapping[str, object]:
        """Options that must be equal on all ranks, by name."""
        return {}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise `ValueError` if these arguments of the constructor exclude the extension."""

    def wrap_transport(self, transport: Transport, ddp: DistributedDataParallel) -> Transport:
        """A transport to use instead of `transport`. Also called during construction of `ddp`."""
        return transport

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        """`ddp` has been constructed, or copied. `starts_equal`: rank 0's weights have just been broadcast."""

    def change_ranks(self, ddp: DistributedDataParallel) -> None:
        """`ddp` continues with the ranks of another group."""

    def pre_forward(self, ddp: DistributedDataParallel) -> None:
        """A forward with gradients begins; nothing has been checked or communicated."""

    def before_module(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        """The module is about to run, with gradients."""

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
