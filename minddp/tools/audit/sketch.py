"""The sketch of a gradient: 64 numbers that are linear in it.

Element i of the flat parameter is multiplied by a random sign, the product of one of its row i // 1024 and one of
its column i % 1024, and added to number i % 64. The signs depend on the parameter's place in a list, so they are
equal on all ranks, and the sketches of a parameter's shards add up to that of the whole. Sums are in float64, over
blocks of rows that fit into a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

NUMBERS = 64
COLUMNS = 1024
BLOCK_ROWS = 256


class Sketcher:
    """Sketches gradients of one parameter of `numel` elements; `seed` is its place."""

    def __init__(self, seed: int, numel: int, device: torch.device):
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (COLUMNS + -(-numel // COLUMNS),), generator=generator).to(device) * 2.0 - 1.0
        self._columns, self._rows = signs[:COLUMNS].double(), signs[COLUMNS:].double()

    def __call__(self, grad: Tensor) -> Tensor:
        """[64], float64. Of a DTensor it is this rank's part: the parts of all ranks add up to the sketch."""
        sums, grad = torch.zeros_like(self._columns), grad.detach()
        if isinstance(grad, DTensor):
            self._add_shard(sums, grad)
        elif grad.is_sparse and grad.sparse_dim() == 1:
            grad, width = grad.coalesce(), grad.shape[1:].numel()
            places = grad.indices()[0][:, None] * width + torch.arange(width, device=grad.device)
            self._add_at(sums, places.reshape(-1), grad.values().reshape(-1))
        else:
            self._add(sums, 0, grad.to_dense().reshape(-1))
        return (sums * self._columns).view(-1, NUMBERS).sum(0)

    def _add(self, sums: Tensor, begin: int, flat: Tensor) -> None:
        """Add the elements `begin`, `begin + 1`, ...: the rest of a row, whole rows, and the beginning of one."""
        row, column = divmod(begin, COLUMNS)
        if column:
            head, flat = flat[: COLUMNS - column], flat[COLUMNS - column :]
            sums[column : column + len(head)] += self._rows[row] * head
            row += 1
        whole = flat[: len(flat) // COLUMNS * COLUMNS].view(-1, COLUMNS)
        for block in whole.split(BLOCK_ROWS) if len(whole) else ():
            sums += self._rows[row : row + len(block)] @ block.double()
            row += len(block)
        if len(tail := flat[whole.numel() :]):
            sums[: len(tail)] += self._rows[row] * tail

    def _add_at(self, sums: Tensor, places: Tensor, flat: Tensor) -> None:
        sums.index_add_(0, places % COLUMNS, self._rows[places // COLUMNS] * flat)

    def _add_shard(self, sums: Tensor, grad: DTensor) -> None:
        """Ranks that hold the same shard each add a part of it."""
        local, copies = grad.to_local(), 1
        shape, begin = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
        for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
            copies *= size if placement.is_replicate() else 1
        if local.numel() and shape[1:] == grad.shape[1:]:  # whole rows of the parameter
            self._add(sums, begin[0] * grad.shape[1:].numel(), local.reshape(-1) / copies)
        elif local.numel():
            places = torch.arange(grad.numel(), device=local.device).view(grad.shape)
            cut = tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))
            self._add_at(sums, places[cut].reshape(-1), local.reshape(-1) / copies)
