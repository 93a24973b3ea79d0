from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minddp.transport.shared_memory.addition_order import (
    all_reduce_chunk,
    chunk_bounds,
    pieces,
    ring_order,
    sum_in_order,
)

MIB = 1024 * 1024


@given(st.integers(2, 9), st.integers(1, 10_000_000), st.sampled_from([1, 2, 4, 8]))
def test_chunks_cover_the_buffer_once(world_size: int, numel: int, itemsize: int) -> None:
    bounds = [chunk_bounds(chunk, world_size, numel, itemsize) for chunk in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(here[1] == following[0] for here, following in itertools.pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)


@pytest.mark.parametrize(
    ("world_size", "numel", "bounds"),
    [
        (2, 1, [(0, 1), (1, 1)]),
        (3, 3, [(0, 2), (2, 3), (3, 3)]),  # two segments of an element each in a chunk
        (2, MIB, [(0, MIB // 2), (MIB // 2, MIB)]),  # two segments of 1 MiB
        (2, 5 * MIB // 4, [(0, 655_362), (655_362, 5 * MIB // 4)]),  # 5 MiB: three, rounded up to whole elements
    ],
)
def test_chunks_consist_of_whole_segments(world_size: int, numel: int, bounds: list[tuple[int, int]]) -> None:
    assert [chunk_bounds(chunk, world_size, numel, itemsize=4) for chunk in range(world_size)] == bounds


def test_a_sum_starts_below_its_owner_and_goes_down_all_the_way_round() -> None:
    assert ring_order(0, 4) == [(2, 3), (1, 2), (0, 1)]
    assert ring_order(2, 4) == [(0, 1), (3, 0), (2, 3)]
    assert ring_order(0, 1) == []


@pytest.mark.parametrize("owner", range(4))
def test_addition_follows_the_ring(owner: int) -> None:
    """With these numbers every order of addition has another sum."""
    values = [1.0, 2.0**24, 2.0**-1, -(2.0**24)]
    addends = [torch.tensor([value]) for value in values]
    expected = torch.tensor(values[(owner - 1) % 4])
    for step in (2, 3, 4):
        expected = expected + values[(owner - step) % 4]
    all_reduce_chunk(addends, owner)
    assert [addend.item() for addend in addends] == [expected.item()] * 4


def test_long_chunks_are_added_block_by_block() -> None:
    numel = 100_001
    addends = [torch.arange(numel, dtype=torch.float64) * (rank + 1) for rank in range(3)]
    all_reduce_chunk(addends, 1)
    for addend in addends:
        assert torch.equal(addend, torch.arange(numel, dtype=torch.float64) * 6)


@given(st.integers(3, 9), st.integers(1, 100_000), st.data())
def test_pieces_are_the_parts_of_chunks(world_size: int, numel: int, data: st.DataObject) -> None:
    first, last = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    expected = [
        (
            max(first, chunk_bounds(chunk, world_size, numel, 4)[0]),
            min(last, chunk_bounds(chunk, world_size, numel, 4)[1]),
        )
        for chunk in range(world_size)
    ]
    found = list(pieces(world_size, numel, 4, first, last))
    assert [(start, stop) for start, stop, _ in found] == [
        (start, stop) for start, stop in expected if start < stop
    ]
    owners = [order[-1][0] for _, _, order in found]
    assert owners == [chunk for chunk, (start, stop) in enumerate(expected) if start < stop]


@pytest.mark.parametrize("owner", range(4))
def test_a_sum_elsewhere_has_the_same_bits_and_leaves_the_addends(owner: int) -> None:
    addends = [torch.randn(70_000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    expected, output = [addend.clone() for addend in addends], torch.empty(70_000)
    all_reduce_chunk(expected, owner)
    before = [addend.clone() for addend in addends]
    sum_in_order(addends, ring_order(owner, 4), output)
    assert output.equal(expected[0])
    assert all(map(torch.equal, addends, before))
