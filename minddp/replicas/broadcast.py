"""Broadcasts of tensors from one rank to all: initial parameters, and buffers before each forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from minddp.transport.protocols import Transport

COALESCE_BYTES = 250 * 1024 * 1024  # as torch


def broadcast_coalesced(
    transport: Transport,
    tensors: Sequence[torch.Tensor],
    source: int = 0,
    coalesce_bytes: int = COALESCE_BYTES,
) -> None:
    """Overwrite `tensors` on every rank with those of rank `source`. Any dtypes, shapes and strides.

    The tensors of a device share messages of up to `coalesce_bytes`; a larger tensor has a message of its own. All
    messages are in flight at the same time.

    Raises:
        RuntimeError: a tensor cannot be overwritten. On every rank, before anything is sent.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided or torch._debug_has_internal_overlap(tensor) == 1:
            raise RuntimeError(
                f"A broadcast cannot overwrite a {tensor.layout} tensor of shape {tuple(tensor.shape)} that is "
                f"sparse or expanded. Register a dense copy instead (`.to_dense()`, `.clone()`)."
            )
    messages = [_FlatMessage(chunk) for chunk in _chunks(tensors, coalesce_bytes)]
    if transport.rank == source:
        for message in messages:
            message.fill()
    works = [transport.broadcast(message.buffer, source) for message in messages]
    for message, work in zip(messages, works, strict=True):
        work.wait()
        if transport.rank != source:
            message.unpack()


class _FlatMessage:
    """Tensors of one device, and the uint8 `buffer` that is sent."""

    def __init__(self, tensors: list[torch.Tensor]):
        sizes = [tensor.nbytes for tensor in tensors]
        self._tensors = tensors
        self._are_plain = not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
        self.buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        pieces = zip(tensors, self.buffer.split(sizes), strict=True)
        self._copies = [piece.view(tensor.dtype).view(tensor.shape) for tensor, piece in pieces]

    def fill(self) -> None:
        torch._foreach_copy_(self._copies, self._tensors)

    def unpack(self) -> None:
        if self._are_plain:
            torch._foreach_copy_(self._tensors, self._copies)
            return
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)


def _chunks(tensors: Sequence[torch.Tensor], coalesce_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The tensors of each message. Wide dtypes come first, so that each tensor is aligned to its element size."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [tensor for tensor in tensors if tensor.device == device]
        chunk: list[torch.Tensor] = []
        nbytes = 0
        for tensor in sorted(here, key=lambda tensor: -tensor.element_size()):
            if chunk and nbytes + tensor.nbytes > coalesce_bytes:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(tensor)
            nbytes += tensor.nbytes
        if chunk:
            yield chunk
