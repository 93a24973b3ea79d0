"""The sketch of a gradient: 64 numbers that are linear in it.

Element i of the flat parameter is multiplied by a random sign, the product of one of its row i // 1024 and one of
its column i % 1024, and added to number i % 64. The signs depend on the parameter's place in a list, so they are
equal on all ranks, and the sketches of a parameter's shards, among zeros, add up to that of the whole. Sums are in
float64, over blocks of rows that fit into a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import pad

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
        flat = (among_zeros(grad) if isinstance(grad, DTensor) else grad.detach().to_dense()).reshape(-1)
        sums = torch.zeros_like(self._columns)
        for signs, block in zip(self._rows.split(BLOCK_ROWS), flat.split(BLOCK_ROWS * COLUMNS), strict=True):
            sums += signs @ pad(block.double(), (0, -len(block) % COLUMNS)).view(-1, COLUMNS)
        return (sums * self._columns).view(-1, NUMBERS).sum(0)


def among_zeros(grad: DTensor) -> Tensor:
    """This rank's shard in a tensor of the whole shape. Ranks that hold the same shard each have a part of it."""
    local, copies = grad.to_local().detach(), 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    shape, begin = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
    whole = local.new_zeros(grad.shape)
    whole[tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))] = local / copies
    return whole
