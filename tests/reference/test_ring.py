"""The ring: the sum, for any number of ranks and size; what it sends, step by step; what it costs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.ring import chunk_slices, ring_all_reduce

ranks_and_sizes = {"n": st.integers(1, 9), "size": st.integers(0, 40), "seed": st.integers(0, 1000)}


def integers(n: int, size: int, seed: int) -> list[np.ndarray]:
    return [*np.random.default_rng(seed).integers(-1000, 1000, (n, size))]


@settings(deadline=None)
@given(**ranks_and_sizes)
def test_each_step_passes_every_chunk_once_to_the_next_rank(n, size, seed):
    run = ring_all_reduce(integers(n, size, seed))
    assert [step.phase for step in run.steps] == ["reduce-scatter"] * (n - 1) + ["all-gather"] * (n - 1)
    for step in run.steps:
        assert [t.sender for t in step.transfers] == list(range(n))
        assert [t.receiver for t in step.transfers] == [(rank + 1) % n for rank in range(n)]
        assert sorted(t.chunks[0] for t in step.transfers) == list(range(n))


@settings(deadline=None)
@given(**ranks_and_sizes)
def test_it_sends_what_is_optimal(n, size, seed):
    inputs = integers(n, size, seed)
    run, nbytes = ring_all_reduce(inputs), inputs[0].nbytes
    transfers = [t for step in run.steps for t in step.transfers]
    sent = [sum(t.nbytes for t in transfers if t.sender == rank) for rank in range(n)]
    least = Fraction(2 * (n - 1) * nbytes, n)
    assert Fraction(sum(sent), n) == least  # on average always,
    if size % n == 0:
        assert set(sent) == {least}  # and each rank if the chunks are equal


@settings(deadline=None)
@given(n=st.integers(2, 9), chunk_size=st.integers(1, 4))
def test_after_the_first_phase_rank_r_has_completed_chunk_r_plus_1_and_no_other(n, chunk_size):
    inputs = [np.full(n * chunk_size, 2**rank) for rank in range(n)]
    after = ring_all_reduce(inputs).steps[n - 2].buffers
    for rank, buffer in enumerate(after):
        complete = [c for c, where in enumerate(chunk_slices(len(buffer), n)) if (buffer[where] == 2**n - 1).all()]
        assert complete == [(rank + 1) % n]


def test_three_ranks_step_by_step():
    run = ring_all_reduce([np.array([1, 1, 1]), np.array([10, 10, 10]), np.array([100, 100, 100])])
    assert [[buffer.tolist() for buffer in step.buffers] for step in run.steps] == [
        [[1, 1, 101], [11, 10, 10], [100, 110, 100]],
        [[1, 111, 101], [11, 10, 111], [111, 110, 100]],
        [[111, 111, 101], [11, 111, 111], [111, 110, 111]],
        [[111, 111, 111], [111, 111, 111], [111, 111, 111]],
    ]


@settings(deadline=None)
@given(size=st.integers(0, 100), n=st.integers(1, 20))
def test_chunks_cover_the_buffer_and_differ_by_at_most_one(size, n):
    chunks = chunk_slices(size, n)
    assert [i for chunk in chunks for i in range(size)[chunk]] == list(range(size))
    lengths = [len(range(size)[chunk]) for chunk in chunks]
    assert len(lengths) == n
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "The ranks have nothing"),
        ([np.zeros(3), np.zeros(4)], r"The ranks have float64\[3\], float64\[4\]"),
        ([np.zeros(3), np.zeros(3, dtype=np.float32)], "float32"),
        ([np.zeros((2, 2))], "flat buffers"),
    ],
)
def test_buffers_that_do_not_match_are_an_error(inputs, message):
    with pytest.raises(ValueError, match=message):
        ring_all_reduce(inputs)
