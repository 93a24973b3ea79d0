"""Fingerprints of bits, and the cycle in which all parameters have their turn."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from minddp.tools.watchdog import fingerprint
from minddp.tools.watchdog.fingerprint import MOST_PARTS, Reading, Slice, cycle_of, rows_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.int8, torch.bool)


def print_of(tensor: torch.Tensor | None) -> int | None:
    return Reading([("it", tensor)]).prints().get("it")


@pytest.mark.parametrize("numel", [7, 1000, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_changes_it(numel: int, dtype: torch.dtype) -> None:
    tensor = torch.zeros(numel, dtype=dtype)
    other = tensor.clone()
    other[-1] = 1
    assert print_of(tensor) == print_of(tensor.clone()) is not None
    assert print_of(tensor) != print_of(other)


@pytest.mark.parametrize("numel", [8, 40_000])
def test_a_permutation_changes_it(numel: int) -> None:
    tensor = torch.randn(numel)
    swapped = tensor.clone()
    swapped[[2, 3, 6, 7]] = tensor[[6, 7, 2, 3]]  # whole words of 64 bits
    assert print_of(tensor) != print_of(swapped)


def test_it_is_of_the_bits_when_it_was_read() -> None:
    tensor = torch.zeros(4)
    reading = Reading([("it", tensor)])
    before = print_of(tensor)
    tensor.add_(1)
    assert reading.prints() == {"it": before} != {"it": print_of(tensor)}


def test_tensors_of_other_sizes_and_dtypes_are_told_apart() -> None:
    tensors = {str(dtype): torch.ones(5, dtype=dtype) for dtype in DTYPES} | {"scalar": torch.ones(())}
    prints = Reading(tensors.items()).prints()
    assert prints == {name: print_of(tensor) for name, tensor in tensors.items()}


def test_every_other_element_of_a_vector_can_be_read() -> None:
    strided = torch.arange(10.0)[::2]
    assert Reading([("p", strided)]).prints() == Reading([("p", strided.clone())]).prints()


def test_heads_are_the_first_bytes() -> None:
    one, other = torch.zeros(2, 8), torch.zeros(2, 8)
    one[1, 1] = 1
    assert Reading([("it", one)], 36).prints() == Reading([("it", other)], 36).prints()
    assert Reading([("it", one)], 40).prints() != Reading([("it", other)], 40).prints()


def test_what_comes_from_a_device_is_waited_for_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    event = mock.Mock()
    monkeypatch.setattr(fingerprint.streams, "timed_event", lambda device: event)
    monkeypatch.setattr(fingerprint.streams, "has_streams", lambda device: True)
    reading = Reading([("it", torch.ones(5))])
    event.synchronize.assert_not_called()
    assert reading.prints() == {"it": print_of(torch.ones(5))}
    event.synchronize.assert_called()


def shapes(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.empty(size, device="meta") for size in sizes]


@pytest.mark.parametrize(
    "tensors",
    [
        shapes((8, 8)),
        shapes(*[(64, 64)] * 400),
        shapes(*[(3,)] * 2000),
        shapes((65_536, 128), (1, 100_000), (4,), ()),
        shapes((0,), (0, 4), (5,)),
    ],
)
def test_a_cycle_covers_each_row_once(tensors: list[torch.Tensor]) -> None:
    parts = cycle_of(tensors)
    assert 1 <= len(parts) <= MOST_PARTS
    rows = [(piece.tensor, row) for part in parts for piece in part for row in range(piece.first, piece.end)]
    expected = [(i, row) for i, t in enumerate(tensors) for row in range(t.shape[0] if t.dim() else 1)]
    assert sorted(rows) == expected


def test_the_parts_of_a_cycle_are_of_like_size() -> None:
    for tensors in (shapes((65_536, 128), *[(64, 64)] * 100), shapes(*[(128, 128), (128,)] * 50)):
        nbytes = [
            sum((piece.end - piece.first) * tensors[piece.tensor][0].nbytes for piece in part)
            for part in cycle_of(tensors)
        ]
        assert max(nbytes) < 2 * sum(nbytes) / len(nbytes)


def test_a_large_parameter_has_a_piece_in_each_part() -> None:
    large = shapes((65_536, 128), *[(64, 64)] * 100)
    assert all(any(piece.tensor == 0 for piece in part) for part in cycle_of(large))


def test_rows_are_read_in_order_whatever_the_strides() -> None:
    tensor = torch.randn(4, 3, 2, 2)
    last = tensor.to(memory_format=torch.channels_last)
    for piece in (Slice(0, 0, 4), Slice(0, 1, 3)):
        assert print_of(rows_of(tensor, piece)) == print_of(rows_of(last, piece))


def test_what_cannot_be_read_is_left_out() -> None:
    freed, there = torch.randn(8, 8), torch.ones(2)
    freed.untyped_storage().resize_(0)
    for tensor in (freed, torch.empty(8, 8, device="meta"), torch.eye(8).to_sparse(), torch.empty(0)):
        assert print_of(tensor) is None
    assert rows_of(torch.empty(4, 8), Slice(0, 4, 8)) is None
    named = [("freed", freed), ("none", None), ("there", there), ("not contiguous", torch.ones(4, 4).t())]
    assert Reading(named, 4).prints().keys() == {"there"}
