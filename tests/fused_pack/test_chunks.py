from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.fused_pack.chunks import (
    CHUNK,
    TENSORS_PER_LAUNCH,
    THREADS,
    VECTORS_PER_THREAD,
    lay_out,
    vector_elements,
)

_NUMELS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 20_000)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(_NUMELS, st.sampled_from([2, 4, 8]), st.integers(0, 1200))
def test_every_element_of_every_gradient_is_in_one_chunk(numels: list[int], vector: int, num_small: int) -> None:
    numels = numels + [3] * num_small
    places = np.cumsum([0, *numels])
    layout = lay_out(numels, places[:-1].tolist(), vector)
    seen = [np.zeros(numel, int) for numel in numels]
    in_bucket = np.zeros(int(places[-1]), int)
    for launch in layout.launches:
        assert launch.stop - launch.first <= TENSORS_PER_LAUNCH
        for chunk in layout.chunks[launch.first_chunk : launch.stop_chunk]:
            assert 0 < chunk["count"] <= THREADS * VECTORS_PER_THREAD * vector
            tensor = launch.first + chunk["tensor"]
            assert tensor < launch.stop
            assert chunk["place"] == places[tensor] + chunk["start"]
            seen[tensor][chunk["start"] : chunk["start"] + chunk["count"]] += 1
            in_bucket[chunk["place"] : chunk["place"] + chunk["count"]] += 1
    assert all((marks == 1).all() for marks in seen)
    assert (in_bucket == 1).all()
    assert [launch.first for launch in layout.launches[1:]] == [launch.stop for launch in layout.launches[:-1]]


def test_two_thousand_small_gradients_take_five_launches() -> None:
    assert len(lay_out([64] * 2000, range(0, 128_000, 64), 4).launches) == 5


def test_a_row_of_the_table_is_laid_out_as_the_kernels_struct() -> None:
    assert (CHUNK.itemsize, CHUNK.fields["tensor"][1], CHUNK.fields["count"][1]) == (24, 16, 20)


def test_a_vector_is_sixteen_bytes_of_the_wider_type() -> None:
    assert [vector_elements(4, 4), vector_elements(2, 2), vector_elements(4, 2), vector_elements(8, 8)] == [
        4,
        8,
        4,
        2,
    ]


def test_empty_gradients_take_no_chunk() -> None:
    layout = lay_out([0, 0], [0, 0], 4)
    assert len(layout.chunks) == 0
    assert layout.launches[0].stop == 2
