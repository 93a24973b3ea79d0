"""The arithmetic of minddp's own hooks, without ranks: rounding to 8 bits, and cutting into shards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minddp.comm_hooks.int8_compression import BLOCK, LARGEST, decode, encode
from minddp.comm_hooks.shards import blocks_per_rank, cut, reassemble, sum_in_rank_order


def rounded(values: torch.Tensor) -> torch.Tensor:
    return decode(encode(values))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ 8 bits


@given(st.integers(0, 2**32), st.floats(-36, 37))
def test_a_rounded_element_is_within_half_a_step(seed: int, magnitude: float) -> None:
    values = normal(7, BLOCK, seed=seed) * 10**magnitude
    half_a_step = values.abs().amax(dim=-1, keepdim=True) / LARGEST / 2
    assert ((rounded(values) - values).abs() <= half_a_step * (1 + 1e-5)).all()


def test_a_block_is_132_bytes_and_has_a_scale_of_its_own() -> None:
    values = normal(3, BLOCK)
    assert encode(values).shape == (3, BLOCK + 4)
    assert encode(values).dtype == torch.uint8
    beside_a_large_one = values.clone()
    beside_a_large_one[0, 0] = 1e9
    assert torch.equal(rounded(values)[1:], rounded(beside_a_large_one)[1:])
    assert (rounded(beside_a_large_one)[0, 1:] == 0).all(), "which is what error feedback is for"


@pytest.mark.parametrize("tiny", [0.0, 1e-45, -1e-44, 1e-39])
def test_zeros_and_the_smallest_numbers_do_not_become_nan(tiny: float) -> None:
    back = rounded(torch.full((1, BLOCK), tiny))
    assert back.isfinite().all()
    assert (back - tiny).abs().max() <= max(abs(tiny), 1e-44)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_whole_block_and_no_other(odd: float) -> None:
    values = normal(2, BLOCK)
    values[0, 5] = odd
    back = rounded(values)
    assert not back[0].isfinite().any()
    assert torch.equal(back[1:], rounded(values[1:]))


def test_int8_loses_a_quarter_of_what_float8_loses() -> None:
    """See the docstring of `int8_compression.py`. Both with one scale for each block."""
    values = normal(2000, BLOCK)
    scale = values.abs().amax(dim=-1, keepdim=True) / 448  # float8_e4m3fn's largest
    in_float8 = (values / scale).to(torch.float8_e4m3fn).float() * scale

    def loss(back: torch.Tensor) -> float:
        return ((back - values).norm() / values.norm()).item()

    assert 0.2 < loss(rounded(values)) / loss(in_float8) < 0.3
    nearly_largest = values.abs() > values.abs().amax(dim=-1, keepdim=True) / 2
    assert ((rounded(values) - values)[nearly_largest]).norm() < (in_float8 - values)[nearly_largest].norm() / 4


# ------------------------------------------------------------------ shards

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 5), st.sampled_from([1, 3, 8]))
def test_joining_undoes_cutting(shapes: list[tuple[int, ...]], num_ranks: int, block: int) -> None:
    gradients = [normal(*shape, seed=place) for place, shape in enumerate(shapes)]
    shards = cut(gradients, num_ranks, block, torch.float32)
    blocks = sum(blocks_per_rank(gradient.numel(), num_ranks, block) for gradient in gradients)
    assert shards.shape == (num_ranks, blocks, block)
    for gradient, back in zip(gradients, reassemble(shards, gradients), strict=True):
        assert torch.equal(gradient, back)


@given(SHAPES, SHAPES)
def test_a_gradient_is_cut_alike_whatever_is_beside_it(
    before: list[tuple[int, ...]], after: list[tuple[int, ...]]
) -> None:
    gradient = normal(5, 11)
    neighbours = [[normal(*shape) for shape in shapes] for shapes in (before, after)]
    beside_others = cut([*neighbours[0], gradient, *neighbours[1]], 3, 8, torch.float32)
    first = sum(blocks_per_rank(one.numel(), 3, 8) for one in neighbours[0])
    alone = cut([gradient], 3, 8, torch.float32)
    assert torch.equal(beside_others[:, first : first + alone.shape[1]], alone)


def test_ranks_are_added_in_their_order() -> None:
    addends = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert sum_in_rank_order(addends).item() == 1.0  # 1e8 + 1 is 1e8 in float32
