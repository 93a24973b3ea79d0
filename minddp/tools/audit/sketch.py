"""The sketch of a gradient: 64 numbers that are linear in it.

The flat parameter is cut into rows of equal length, at most 512. First, each row is added up with a random sign for
each column: one product of a matrix with a vector, which reads the gradient once. Then number i is the sum of the
i-th 64th of the rows, with a random sign for each: one operation for all parameters, in float64. Signs are equal on
all ranks, so the sketches of a parameter's shards, among zeros, add up to that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

NUMBERS = 64
COLUMNS = 512  # more are less exact in float32
BLOCK_ROWS = 2**15  # of another precision are converted at once


class Sketcher:
    """Adds up the gradients of some `params`, and sketches all of them at once."""

    def __init__(self, params: Sequence[Tensor]):
        widths = [row_length(param.numel()) for param in params]
        counts = [param.numel() // width for param, width in zip(params, widths, strict=True)]
        dtype = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (COLUMNS + sum(counts),), generator=generator).to(params[0].device) * 2.0 - 1.0
        columns, self._row_signs = signs[:COLUMNS].to(dtype), signs[COLUMNS:].double()
        numbers = [NUMBERS * place + torch.arange(count) * NUMBERS // count for place, count in enumerate(counts)]
        self._numbers = torch.cat(numbers).to(signs.device)
        self._sums = torch.zeros(sum(counts), dtype=dtype, device=signs.device)
        of_params = zip(zip(counts, widths, strict=True), self._sums.split(counts), strict=True)
        self._of_param = [(shape, columns[: shape[1]], sums) for shape, sums in of_params]

    def add(self, place: int, grad: Tensor) -> None:
        """A gradient of parameter `place`; of a DTensor, this rank's part."""
        shape, columns, sums = self._of_param[place]
        grad = among_zeros(grad) if isinstance(grad, DTensor) else grad.to_dense()
        rows = grad.detach().reshape(shape)
        if rows.dtype == sums.dtype and rows.device == sums.device:
            sums.addmv_(rows, columns)  # in place: autocast would round
            return
        for some, of_some in zip(rows.split(BLOCK_ROWS), sums.split(BLOCK_ROWS), strict=True):
            of_some.addmv_(some.to(of_some), columns)

    def take(self) -> Tensor:
        """The sketches, [parameters, 64], of all that was added since the last call."""
        sketches = self._row_signs.new_zeros(NUMBERS * len(self._of_param))
        sketches.index_add_(0, self._numbers, self._sums * self._row_signs)
        self._sums.zero_()
        return sketches.view(-1, NUMBERS)


def row_length(elements: int) -> int:
    """The largest that divides the elements into 64 rows or more."""
    return next((width for width in range(min(COLUMNS, elements // NUMBERS), 1, -1) if elements % width == 0), 1)


def among_zeros(grad: DTensor) -> Tensor:
    """This rank's shard in a tensor of the whole shape. Ranks that hold the same shard each have a part of it."""
    local, copies = grad.to_local().detach(), 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    shape, begin = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
    whole = local.new_zeros(grad.shape)
    whole[tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))] = local / copies
    return whole
