"""Fingerprints: checksums that are equal on two ranks if, and except by chance only if, the bits of a tensor are.

[Note: a cycle of fingerprints]
Fingerprints of all parameters would cost some percent of a step. So the parameters are cut into *pieces* (runs of
rows), and the pieces grouped into *parts* of about `PART_BYTES`; each sampled step fingerprints the next part.
Large models have `MOST_PARTS` larger parts. A large parameter has a piece in each part: a change of all of it shows
in the next record, a change of a single element within a cycle. The parts follow from the shapes of the parameters,
so all ranks fingerprint the same pieces in the same step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from minddp.platform import streams

PART_BYTES = 256 * 1024
MOST_PARTS = 64  # of a cycle
PIECE_BYTES = 16 * 1024  # the fixed cost of a piece, as the bytes that could be read in that time


class Slice(NamedTuple):
    """Rows `first` to `end` of the tensor number `tensor`."""

    tensor: int
    first: int
    end: int


def cycle_of(tensors: Sequence[torch.Tensor]) -> list[list[Slice]]:
    """The pieces in each part of a cycle. See [Note: a cycle of fingerprints]."""
    costs = [tensor.nbytes + PIECE_BYTES for tensor in tensors]
    num_parts = min(max(1, sum(costs) // PART_BYTES), MOST_PARTS)
    parts: list[list[Slice]] = [[] for _ in range(num_parts)]
    cost_of_part = [0.0] * num_parts
    for number, tensor in enumerate(tensors):
        rows = tensor.shape[0] if tensor.dim() else 1
        cuts = max(1, min(rows, num_parts, costs[number] // (2 * PIECE_BYTES)))
        least = cost_of_part.index(min(cost_of_part))
        for cut in range(cuts):
            part = (least + cut * num_parts // cuts) % num_parts
            parts[part].append(Slice(number, rows * cut // cuts, rows * (cut + 1) // cuts))
            cost_of_part[part] += costs[number] / cuts
    return parts


def rows_of(tensor: torch.Tensor, piece: Slice) -> torch.Tensor | None:
    """The piece of the tensor; `None` if it cannot be read, or its shape has changed."""
    if not tensor.dim() or (piece.first == 0 and piece.end == tensor.shape[0]):
        return tensor
    if piece.end > tensor.shape[0] or not _is_readable(tensor):
        return None
    return tensor.detach()[piece.first : piece.end]


class Reading:
    """Fingerprints (CRCs) of some tensors on one device, or of the first `head_bytes` of each, by name.

    The constructor copies the bytes, from a device without waiting for it; `prints`, which another thread calls,
    waits. A tensor is left out if it is sparse or freed, or if it is not contiguous and only its head is read.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor | None]] = (), head_bytes: int | None = None):
        flat = {
            name: tensor.detach().reshape(-1).contiguous().view(torch.uint8)[:head_bytes]
            for name, tensor in named
            if tensor is not None and _is_readable(tensor) and (head_bytes is None or tensor.is_contiguous())
        }
        self._sizes = {name: read.numel() for name, read in flat.items()}
        copied = torch.cat([*flat.values()]) if flat else torch.empty(0, dtype=torch.uint8)
        self._bytes = copied.to("cpu", non_blocking=True)
        self._event = streams.timed_event(copied.device) if streams.has_streams(copied.device) else None

    def prints(self) -> dict[str, int]:
        if self._event is not None:
            self._event.synchronize()
        parts = self._bytes.split([*self._sizes.values()])
        return {name: zlib.crc32(part.numpy()) for name, part in zip(self._sizes, parts, strict=True)}


def _is_readable(tensor: torch.Tensor) -> bool:
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    is_odd = tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    return not is_odd and tensor.untyped_storage().nbytes() > 0
