"""Replicas must be equal before they can stay equal: verify, broadcast rank 0's state, keep buffers in step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minddp.transport import Transport

COALESCE_BYTES = 250 * 1024 * 1024  # torch's bound on one coalesced broadcast


def verify_replicas_agree(transport: Transport, named_params: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise on every rank unless all ranks hold as many parameters, of the same shapes, strides and dtypes.

    One small all-gather of a fingerprint when all is well; only when fingerprints differ are the descriptions
    themselves exchanged, so that the error can name the parameter, the rank and both sides.

    Raises:
        RuntimeError: the replicas differ. Begins with torch's wording, which scripts match on.
    """
    device = named_params[0][1].device
    ours = json.dumps([_describe(name, param) for name, param in named_params]).encode()
    layout = json.dumps([_describe("", param) for _, param in named_params]).encode()
    digest = int.from_bytes(hashlib.blake2b(layout, digest_size=7).digest(), "big")
    header = torch.tensor([digest, len(ours)], dtype=torch.int64, device=device)
    headers = [h.tolist() for h in transport.all_gather(header)]
    if all(digest == headers[0][0] for digest, _ in headers):
        return
    padded = torch.zeros(max(length for _, length in headers), dtype=torch.uint8, device=device)
    padded[: len(ours)] = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
    texts = [
        bytes(text[:length].tolist())
        for text, (_, length) in zip(transport.all_gather(padded), headers, strict=True)
    ]
    raise RuntimeError(_explain_difference(transport.rank, [json.loads(text) for text in texts]))


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
    """Tensors and the flat buffer of bytes that carries them."""

    tensors: list[torch.Tensor]
    buffer: torch.Tensor

    @classmethod
    def of(cls, tensors: list[torch.Tensor], *, fill: bool) -> _Parcel:
        if fill:
            return cls(tensors, torch.cat([_as_bytes(tensor) for tensor in tensors]))
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return cls(tensors, torch.empty(nbytes, dtype=torch.uint8, device=tensors[0].device))

    def unpack(self) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        for tensor, piece in zip(self.tensors, self.buffer.split(sizes), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
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


def _describe(name: str, param: torch.Tensor) -> list[object]:
    return [name, list(param.shape), list(param.stride()), str(param.dtype)]


def _explain_difference(rank: int, descriptions: list[list[list]]) -> str:
    """The first difference between rank 0 and another rank, as rank `rank` should tell it."""
    reference = descriptions[0]
    for other, theirs in enumerate(descriptions):
        if len(theirs) != len(reference):
            # Torch's sentence is from this rank's viewpoint, so it must name a rank that differs from it.
            here = len(descriptions[rank])
            peer = next(i for i, d in enumerate(descriptions) if len(d) != here)
            only = sorted({p[0] for p in theirs} ^ {p[0] for p in reference})
            return (
                f"DDP expects same model across all ranks, but Rank {rank} has {here} params, while rank "
                f"{peer} has inconsistent {len(descriptions[peer])} params.\n"
                f"Parameters that rank 0 and rank {other} do not share: {', '.join(only) or 'none by name'}. "
                f"Build the same module on every rank, with the same parameters requiring grad."
            )
        for index, (mine, yours) in enumerate(zip(reference, theirs, strict=True)):
            if mine[1:] == yours[1:]:
                continue
            (aspect, left, right) = next(
                (aspect, a, b)
                for aspect, a, b in zip(("sizes", "strides", "dtype"), mine[1:], yours[1:], strict=True)
                if a != b
            )
            process = "this process" if other == rank else f"process {other}"
            return (
                f"[{rank}]: params[{index}] in {process} with sizes {yours[1]} appears not to match {aspect} "
                f"of the same param in process 0.\n"
                f"`{mine[0]}` has {aspect} {left} on rank 0; "
                f"{'it' if yours[0] == mine[0] else f'`{yours[0]}`'} has {right} on rank {other}. "
                f"Build the same module on every rank before wrapping it."
            )
    return "The replicas' fingerprints differ although their descriptions agree."  # a hash cannot do this
