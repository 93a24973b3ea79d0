"""Make tensors on all ranks those of one rank: how replicas become equal, and how their buffers stay in step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minddp.transport import Transport

COALESCE_BYTES = 250 * 1024 * 1024  # torch's bound on one coalesced broadcast


def broadcast_coalesced(
    transport: Transport,
    tensors: Sequence[torch.Tensor],
    source: int = 0,
    coalesce_bytes: int = COALESCE_BYTES,
) -> None:
    """Overwrite `tensors` on every rank with those of rank `source`. Any dtypes, shapes and strides.

    Many small messages become few large ones: tensors of one device share a buffer of bytes, up to
    `coalesce_bytes` each (a larger tensor travels alone), and all buffers are under way at once.
    """
    _refuse_unsendable(tensors)
    parcels = [_Parcel.of(chunk, fill=transport.rank == source) for chunk in _chunks(tensors, coalesce_bytes)]
    works = [transport.broadcast(parcel.buffer, source) for parcel in parcels]
    for parcel, work in zip(parcels, works, strict=True):
        work.wait()
        if transport.rank != source:
            parcel.unpack()


@dataclass
class _Parcel:
    """Tensors and the flat buffer of bytes that carries them. A lone one may be its own buffer: no tensors then."""

    tensors: list[torch.Tensor]
    buffer: torch.Tensor

    @classmethod
    def of(cls, tensors: list[torch.Tensor], *, fill: bool) -> _Parcel:
        if len(tensors) == 1 and _is_plain(tensors[0]):
            return cls([], tensors[0].view(-1).view(torch.uint8))
        if fill:
            return cls(tensors, torch.cat([_as_bytes(tensor) for tensor in tensors]))
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return cls(tensors, torch.empty(nbytes, dtype=torch.uint8, device=tensors[0].device))

    def unpack(self) -> None:
        if not self.tensors:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        for tensor, piece in zip(self.tensors, self.buffer.split(sizes), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if _is_plain(tensor):
        return tensor.view(-1).view(torch.uint8)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _refuse_unsendable(tensors: Sequence[torch.Tensor]) -> None:
    """On every rank, before anything is sent: nobody shall wait for a rank that has raised."""
    for tensor in tensors:
        if tensor.layout != torch.strided or torch._debug_has_internal_overlap(tensor) == 1:
            raise RuntimeError(
                f"A broadcast cannot overwrite a {tensor.layout} tensor of shape {tuple(tensor.shape)} that is "
                f"sparse or expanded. Register a dense copy instead (`.to_dense()`, `.clone()`)."
            )


def _chunks(tensors: Sequence[torch.Tensor], coalesce_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Tensors by device, cut into runs of at most `coalesce_bytes`.

    Wide elements come first, so that every tensor starts at a multiple of its element size.
    """
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [tensor.detach() for tensor in tensors if tensor.device == device]
        chunk: list[torch.Tensor] = []
        nbytes = 0
        for tensor in sorted(here, key=lambda tensor: -tensor.element_size()):
            size = tensor.numel() * tensor.element_size()
            if chunk and nbytes + size > coalesce_bytes:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(tensor)
            nbytes += size
        if chunk:
            yield chunk
