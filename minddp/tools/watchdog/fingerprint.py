"""Fingerprints: numbers that are equal on two ranks if, and except by chance only if, the bits of a tensor are.

Each 8 bytes count as an integer, and the integers are added, with overflow. That reads the tensor once. It does not
see that these integers have changed places. Of one element each, all weights times 2 would have the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minddp.platform import streams


class Reading:
    """The fingerprints of some tensors on one device, by name; without those that are sparse or freed.

    The constructor does not wait for the device; `prints`, which another thread calls, does.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor | None]] = ()):
        sums = {name: _sum_of_bits(tensor) for name, tensor in named if tensor is not None and is_readable(tensor)}
        self._names = [*sums]
        on_device = torch.stack([*sums.values()]) if sums else torch.empty(0)
        self._sums = on_device.to("cpu", non_blocking=True)
        self._event = streams.timed_event(on_device.device) if streams.has_streams(on_device.device) else None

    def prints(self) -> dict[str, int]:
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._sums.tolist(), strict=True))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    read = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if read.numel() % 8 or read.storage_offset() % 8:
        read = torch.nn.functional.pad(read, (0, -read.numel() % 8))
    words = read.view(torch.int64)
    if tensor.element_size() >= 8:
        words = words ^ (words >> 32)
    return words.sum()


def is_readable(tensor: torch.Tensor) -> bool:
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    is_odd = tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    return not is_odd and tensor.untyped_storage().nbytes() > 0
