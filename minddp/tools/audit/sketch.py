"""The sketch of a gradient: 64 numbers that are linear in it.

Element i of the flat parameter is multiplied by a random sign, which is the product of a sign of its row i // 1024 and
one of its column i % 1024, and added to number i % 64. The signs depend on the place of the parameter alone, so they
are equal on all ranks. Hence the sketch of a sum is the sum of the sketches, and the sketches of a parameter's shards
add up to that of the whole. Sums are taken in float64, over blocks of rows that fit into a core's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate

NUMBERS = 64
COLUMNS = 1024
BLOCK_ROWS = 256


class Sketcher:
    """Sketches gradients of one parameter of `numel` elements, the one with this `seed`, on one device."""

    def __init__(self, seed: int, numel: int, device: torch.device):
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (-(-numel // COLUMNS) + COLUMNS,), generator=generator) * 2.0 - 1.0
        self._columns, self._rows = signs.to(device, torch.float64).split([COLUMNS, len(signs) - COLUMNS])

    def __call__(self, grad: Tensor) -> Tensor:
        """[64], float64. `grad` is dense, sparse, or a DTensor, of which it is this rank's part of the sketch."""
        grad = grad.detach()
        sums = torch.zeros(COLUMNS, dtype=torch.float64, device=self._rows.device)
        if isinstance(grad, DTensor):
            self._add_shard(sums, grad)
        elif grad.layout is not torch.strided:
            grad = grad.coalesce()
            shape, rest = grad.shape[: grad.sparse_dim()], grad.shape[grad.sparse_dim() :].numel()
            places = _flat_places(grad.indices(), shape)[:, None] * rest + torch.arange(rest, device=grad.device)
            self._add_at(sums, grad.values().reshape(-1), places.reshape(-1))
        else:
            self._add(sums, grad.reshape(-1), 0)
        return (sums * self._columns).view(-1, NUMBERS).sum(0)

    def _add(self, sums: Tensor, flat: Tensor, offset: int) -> None:
        """Add elements `offset`, `offset + 1`, ... of the parameter: a rest of a row, whole rows, a rest."""
        row, first = divmod(offset, COLUMNS)
        if first:
            head, flat = flat[: COLUMNS - first], flat[COLUMNS - first :]
            sums[first : first + len(head)] += self._rows[row] * head
            row += 1
        whole = flat[: len(flat) // COLUMNS * COLUMNS].view(-1, COLUMNS)
        for block in whole.split(BLOCK_ROWS) if len(whole) else ():
            sums += self._rows[row : row + len(block)] @ block.to(torch.float64)
            row += len(block)
        if len(tail := flat[whole.numel() :]):
            sums[: len(tail)] += self._rows[row] * tail

    def _add_at(self, sums: Tensor, flat: Tensor, places: Tensor) -> None:
        sums.index_add_(0, places % COLUMNS, self._rows[places // COLUMNS] * flat)

    def _add_shard(self, sums: Tensor, grad: DTensor) -> None:
        """Ranks with the same shard each add their part of it."""
        mesh, placements, local = grad.device_mesh, grad.placements, grad.to_local()
        shape, start = compute_local_shape_and_global_offset(grad.shape, mesh, placements)
        copies = 1
        for size, placement in zip(mesh.shape, placements, strict=True):
            copies *= size if isinstance(placement, Replicate) else 1
        if not local.numel():
            return
        flat = local.reshape(-1) / copies if copies > 1 else local.reshape(-1)
        if tuple(shape[1:]) == tuple(grad.shape[1:]):  # whole rows of the parameter
            return self._add(sums, flat, start[0] * grad.shape[1:].numel())
        indices = [torch.arange(first, first + size) for first, size in zip(start, shape, strict=True)]
        places = _flat_places(torch.cartesian_prod(*indices).T, grad.shape)
        self._add_at(sums, flat, places.to(flat.device))


def _flat_places(indices: Tensor, shape: torch.Size) -> Tensor:
    """The places in row-major order of the elements with these indices [dimensions, n]."""
    places = torch.zeros_like(indices[0])
    for index, size in zip(indices, shape, strict=True):
        places = places * size + index
    return places
