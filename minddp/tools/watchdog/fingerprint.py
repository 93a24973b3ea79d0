"""Fingerprints: numbers that are equal on two ranks if, and except by chance only if, the bits of a tensor are.

Each element counts as an integer, or each 8 bytes of a large tensor, and the integers are added, with overflow.
That reads the tensor once. It does not see that these integers have changed places. Of elements with 8 bytes, all
weights times 2 would have the same sum: so their upper half is mixed in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from minddp.platform import streams

SMALL_BYTES = 16 * 1024  # an operation on a smaller tensor takes longer than a copy of it
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
Name = TypeVar("Name", bound=Hashable)


class Reading:
    """The fingerprints of some tensors on one device, by name; without those that are not `readable`.

    The constructor does not wait for the device; `prints`, which another thread calls, does.
    """

    @torch.no_grad()
    def __init__(self, named: Iterable[tuple[str, torch.Tensor | None]] = ()):
        self._small, large = by_size(readable(named))
        sums = []
        for tensor in large.values():
            flat = tensor.reshape(-1).contiguous()
            nbytes = flat.element_size() * flat.numel()
            if nbytes % 8 or flat.element_size() * flat.storage_offset() % 8:
                flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -nbytes % 8))
            words = flat.view(torch.int64)
            if tensor.element_size() >= 8:
                words = words ^ (words >> 32)
            sums.append(words.sum())
        self._large = [*large]
        self._sums = Copied(torch.stack(sums) if sums else torch.empty(0))

    def prints(self) -> dict[str, int]:
        found = dict(zip(self._large, self._sums.read().tolist(), strict=True))
        for copies in self._small:
            found |= copies.prints()
        return found


class Copies(Generic[Name]):
    """Copies of some tensors of one dtype, one behind another, made by one operation."""

    def __init__(self, tensors: Mapping[Name, torch.Tensor]):
        self._names = [*tensors]
        self._sizes = [tensor.numel() for tensor in tensors.values()]
        flat = torch._utils._flatten_dense_tensors([*tensors.values()])
        self._flat = Copied(flat.clone() if len(tensors) == 1 else flat)

    def prints(self) -> dict[Name, int]:
        flat = self._flat.read()
        integers = flat.view(_INTEGERS[flat.element_size()]).numpy()
        if flat.element_size() == 8:
            integers = integers ^ (integers >> 32)
        sums = np.add.reduceat(integers, np.cumsum([0, *self._sizes[:-1]]), dtype=np.int64)
        return dict(zip(self._names, sums.tolist(), strict=True))

    def not_finite(self) -> list[Name]:
        """The names of those that have NaN or infinity."""
        flat = self._flat.read()
        if flat.isfinite().all():
            return []
        parts = zip(self._names, flat.split(self._sizes), strict=True)
        return [name for name, part in parts if not part.isfinite().all()]


def by_size(tensors: Mapping[Name, torch.Tensor]) -> tuple[list[Copies[Name]], dict[Name, torch.Tensor]]:
    """Copies of the small tensors, and the others."""
    small: dict[torch.dtype, dict[Name, torch.Tensor]] = {}
    large: dict[Name, torch.Tensor] = {}
    for name, tensor in tensors.items():
        is_small = 0 < tensor.nbytes < SMALL_BYTES and tensor.element_size() in _INTEGERS
        (small.setdefault(tensor.dtype, {}) if is_small else large)[name] = tensor
    return [Copies(of_dtype) for of_dtype in small.values()], large


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
    found = {}
    for name, tensor in named:  # runs within backward
        tensor = getattr(tensor, "_local_tensor", tensor)
        if (
            tensor is not None
            and (type(tensor) in _PLAIN or type(tensor.data) is torch.Tensor)
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() > 0
        ):
            found[name] = tensor
    return found


def shard_name(name: str, param: Any) -> str:
    """The name, with the place of this rank's part of a distributed tensor. Parts of one name are replicas."""
    placements, mesh = getattr(param, "placements", ()), getattr(param, "device_mesh", None)
    places = zip(placements, (mesh and mesh.get_coordinate()) or (), strict=False)
    shards = [str(place) for placement, place in places if not placement.is_replicate()]
    return f"{name} (shard {'.'.join(shards)})" if shards else name
