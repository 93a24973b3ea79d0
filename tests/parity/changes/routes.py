"""Other ways through the model, for all forwards that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.parity.layers import Embedding
from tests.parity.network import Use

if TYPE_CHECKING:
    from tests.parity.side import Side

#: Ways to use layer `i` twice; `o` is another layer.
REUSES = {
    "again": lambda i, o: [Use((i,)), Use((i,))],
    "around another": lambda i, o: [Use((i,)), Use((o,)), Use((i,))],
    "in one checkpoint": lambda i, o: [Use((i, i), "checkpoint")],
    "in one reentrant": lambda i, o: [Use((i, i), "reentrant")],
    "in two checkpoints": lambda i, o: [Use((i,), "checkpoint"), Use((i,), "checkpoint")],
    "in two reentrant": lambda i, o: [Use((i,), "reentrant"), Use((i,), "reentrant")],
    "plain and reentrant": lambda i, o: [Use((i,)), Use((i,), "reentrant")],
    "reentrant around another": lambda i, o: [Use((i,), "reentrant"), Use((o,)), Use((i,), "reentrant")],
    "plain and reentrant around another": lambda i, o: [Use((i,)), Use((o,)), Use((i,), "reentrant")],
    "reentrant and plain around another": lambda i, o: [Use((i,), "reentrant"), Use((o,)), Use((i,))],
    "nested around another": lambda i, o: [Use((i,), "nested"), Use((o,)), Use((i,), "nested")],
    "reentrant with another": lambda i, o: [Use((i,)), Use((o, i), "reentrant")],
    "plain and nested": lambda i, o: [Use((i,)), Use((i,), "nested")],
}


def reuse(side: Side, layer: int, how: str) -> None:
    """A layer is used twice, as `REUSES` has it, where the first of those layers was."""
    count = len(side.model.layers)
    layer %= count
    stops = REUSES[how](layer, (layer + 1) % count)
    others = {index for use in stops for index in use.layers}
    route = [use for use in side.model.straight if use.layers[0] not in others]
    first = min(others)
    side.model.route = (*route[:first], *stops, *route[first:])


def checkpoint(side: Side, layer: int, how: str) -> None:
    """A layer is computed again in backward: `how` is "checkpoint", "reentrant" or "nested"."""
    layer %= len(side.model.layers)
    side.model.route = tuple(Use(use.layers, how if layer in use.layers else use.how) for use in side.model.route)


def drop(side: Side, layer: int) -> None:
    """A layer is not used any more."""
    layer %= len(side.model.layers)
    side.model.route = tuple(use for use in side.model.straight if layer not in use.layers)


def drop_on_rank(side: Side, layer: int, rank: int) -> list[torch.Tensor]:
    """One step in which a single rank leaves a layer out.

    If its gradient is sparse, torch raises on that rank, and the others wait without end. So its step is left out.
    """
    left_out = side.layer(layer)
    if side.is_torch and isinstance(left_out, Embedding) and left_out.table.sparse:
        raise RuntimeError("torch cannot leave out a sparse gradient on one rank")
    before = side.model.route
    straight(side)
    if side.rank == rank % side.script.world_size:
        drop(side, layer)
    try:
        return side.train()
    finally:
        side.model.route = before


def reorder(side: Side, shift: int) -> None:
    """The layers in reverse, beginning elsewhere."""
    stops = side.model.straight[::-1]
    shift %= len(stops)
    side.model.route = stops[shift:] + stops[:shift]


def straight(side: Side) -> None:
    """As it was in the beginning."""
    side.model.route = side.model.straight


def output_as(side: Side, kind: str) -> None:
    """Forward returns something else, see `Network`."""
    side.model.output = kind
