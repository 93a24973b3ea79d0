"""Fingerprints: numbers that are equal on two ranks if, and except by chance only if, the bits of a tensor are.

Each 8 bytes count as an integer, and the integers are added, with overflow. That reads the tensor once. It does not
see that these integers have changed places. Of one element each, all weights times 2 would have the same sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import torch

from minddp.platform import streams

Name = TypeVar("Name", bound=Hashable)


class Reading:
    """The fingerprints of some tensors on one device, by name; without those that are not `readable`.

    The constructor does not wait for the device; `prints`, which another thread calls, does.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor | None]] = ()):
        tensors = readable(named)
        sums = []
        for tensor in tensors.values():  # runs within backward: no call of Python for each parameter
            flat = tensor.reshape(-1).contiguous()
            nbytes = flat.element_size() * flat.numel()
            if nbytes % 8 or flat.element_size() * flat.storage_offset() % 8:
                flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -nbytes % 8))
            words = flat.view(torch.int64)
            if tensor.element_size() >= 8:
                words = words ^ (words >> 32)
            sums.append(words.sum())
        self._names = [*tensors]
        self._sums = Copied(torch.stack(sums) if sums else torch.empty(0))

    def prints(self) -> dict[str, int]:
        return dict(zip(self._names, self._sums.read().tolist(), strict=True))


class Copied:
    """A tensor on its way to the CPU."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._event = streams.timed_event(tensor.device) if streams.has_streams(tensor.device) else None

    def read(self) -> torch.Tensor:
        """Waits for the copy, and for nothing that is computed after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def readable(named: Iterable[tuple[Name, torch.Tensor | None]]) -> dict[Name, torch.Tensor]:
    """The tensors whose bits can be read, by name: not those that are sparse, freed, lazy or of another class.

    Of a distributed tensor (DTensor), which is not imported for this, it is this rank's part.
    """
    return {
        name: tensor.detach()
        for name, tensor in ((name, getattr(tensor, "_local_tensor", tensor)) for name, tensor in named)
        if tensor is not None
        and type(tensor.data) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > 0
    }


def shard_name(name: str, param: Any) -> str:
    """The name, with the place of this rank's part of a distributed tensor. Parts of one name are replicas."""
    placements, mesh = getattr(param, "placements", ()), getattr(param, "device_mesh", None)
    places = zip(placements, (mesh and mesh.get_coordinate()) or (), strict=False)
    shards = [str(place) for placement, place in places if not placement.is_replicate()]
    return f"{name} (shard {'.'.join(shards)})" if shards else name
