"""Make tensors on all ranks those of one rank: how replicas become equal, and how their buffers stay in step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from minddp.transport.protocols import Transport

COALESCE_BYTES = 250 * 1024 * 1024  # torch's bound on one coalesced broadcast


def broadcast_coalesced(
    transport: Transport,
    tensors: Sequence[torch.Tensor],
    source: int = 0,
    coalesce_bytes: int = COALESCE_BYTES,
) -> None:
    """Overwrite `tensors` on every rank with those of rank `source`. Any dtypes, shapes and strides."""
    CoalescedBroadcast(tensors, coalesce_bytes).broadcast(transport, source)


class CoalescedBroadcast:
    """Tensors that are broadcast together, as often as wanted.

    Many small messages become few large ones: tensors of one device share a message of bytes, up to
    `coalesce_bytes` each (a larger tensor travels alone), and all messages are under way at once.

    Raises:
        RuntimeError: a tensor that cannot be overwritten. On every rank, before anything is sent.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], coalesce_bytes: int = COALESCE_BYTES):
        for tensor in tensors:
            if tensor.layout != torch.strided or torch._debug_has_internal_overlap(tensor) == 1:
                raise RuntimeError(
                    f"A broadcast cannot overwrite a {tensor.layout} tensor of shape {tuple(tensor.shape)} that is "
                    f"sparse or expanded. Register a dense copy instead (`.to_dense()`, `.clone()`)."
                )
        self._tensors = list(tensors)
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._messages = [_FlatMessage(chunk) for chunk in _chunks(tensors, coalesce_bytes)]

    @property
    def nbytes(self) -> int:
        return sum(message.wire.numel() for message in self._messages)

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if these are the tensors that it was made of, unchanged in dtype and shape."""
        return (
            len(tensors) == len(self._tensors)
            and all(one is other for one, other in zip(tensors, self._tensors, strict=True))
            and [(tensor.dtype, tensor.shape) for tensor in tensors] == self._kinds
        )

    def broadcast(self, transport: Transport, source: int) -> None:
        if transport.rank == source:
            for message in self._messages:
                message.fill()
        works = [transport.broadcast(message.wire, source) for message in self._messages]
        for message, work in zip(self._messages, works, strict=True):
            work.wait()
            if transport.rank != source:
                message.unpack()


class _FlatMessage:
    """Tensors of one device, and what carries them: `wire`, uint8."""

    def __init__(self, tensors: list[torch.Tensor]):
        sizes = [tensor.nbytes for tensor in tensors]
        self._tensors = tensors
        self._are_plain = not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
        with torch.inference_mode(False):  # it may be kept for steps that are none of inference
            self.wire = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
            self._copies = [
                piece.view(tensor.dtype).view(tensor.shape)
                for tensor, piece in zip(tensors, self.wire.split(sizes), strict=True)
            ]

    def fill(self) -> None:
        torch._foreach_copy_(self._copies, self._tensors)

    def unpack(self) -> None:
        if self._are_plain:
            torch._foreach_copy_(self._tensors, self._copies)
            return
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)


def _chunks(tensors: Sequence[torch.Tensor], coalesce_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Tensors by device, cut into runs of at most `coalesce_bytes`.

    Wide elements come first, so that every tensor starts at a multiple of its element size.
    """
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
