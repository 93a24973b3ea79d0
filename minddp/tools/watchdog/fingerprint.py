"""Fingerprints: numbers that are equal on two ranks if, and except by chance only if, the bits of a tensor are.

Small tensors are copied, and the CPU hashes their bytes. Of a large one each 8 bytes count as an integer, and the
integers are added, with overflow. That reads the tensor once. It does not see that these integers have changed
places. Of elements with 8 bytes, all weights times 2 would have the same sum: so their upper half is mixed in.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import torch

from minddp.platform import streams

SMALL_BYTES = 16 * 1024  # an operation on a smaller tensor takes longer than a copy of it
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Name = TypeVar("Name", bound=Hashable)


class Reading:
    """The fingerprints of some tensors on one device, by name; without those that are not `readable`.

    The constructor does not wait for the device; `prints`, which another thread calls, does.
    """

    @torch.no_grad()
    def __init__(self, named: Iterable[tuple[Hashable, torch.Tensor | None]] = ()):
        small: dict[tuple[torch.device, torch.dtype], dict[Hashable, torch.Tensor]] = defaultdict(dict)
        sums = {}
        for name, tensor in readable(named).items():
            if tensor.nbytes < SMALL_BYTES:
                small[tensor.device, tensor.dtype][name] = tensor
                continue
            flat = tensor.reshape(-1).contiguous().view(torch.uint8)
            if flat.numel() % 8 or flat.storage_offset() % 8:
                flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
            words = flat.view(torch.int64)
            if tensor.element_size() >= 8:
                words = words ^ (words >> 32)
            sums[name] = words.sum()
        self._small = []  # the sizes and the contents of those of one device and dtype
        for alike in small.values():
            flat = torch._utils._flatten_dense_tensors([*alike.values()])
            sizes = {name: tensor.nbytes for name, tensor in alike.items()}
            self._small.append((sizes, Copied(flat.clone() if len(alike) == 1 else flat)))
        self._large = [*sums]
        self._sums = Copied(torch.stack([*sums.values()]) if sums else torch.empty(0, device="cpu"))

    def prints(self) -> dict[Any, int]:
        found = dict(zip(self._large, self._sums.read().tolist(), strict=True))
        for nbytes, copies in self._small:
            contents, start = copies.read().view(torch.uint8).numpy().data, 0
            for name, size in nbytes.items():
                found[name] = zlib.crc32(contents[start : start + size])
                start += size
        return found


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
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
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
