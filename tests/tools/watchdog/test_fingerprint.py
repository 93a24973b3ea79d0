"""Fingerprints of the bits of tensors."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from minddp.tools.watchdog import fingerprint
from minddp.tools.watchdog.fingerprint import Reading

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


def test_a_default_device_and_transformed_tensors_do_not_matter() -> None:
    seen = []
    with torch.device("meta"):
        assert Reading().prints() == {}
    torch.vmap(lambda row: (seen.append(print_of(row)), row)[1])(torch.ones(2, 3))
    assert seen == [None]


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


@pytest.mark.parametrize("change", [lambda it: 2 * it, lambda it: -it, lambda it: it + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_change_of_all_elements_changes_it(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert print_of(tensor) != print_of(change(tensor))


def test_it_does_not_depend_on_strides_and_place() -> None:
    tensor = torch.randn(5, 3, 2, 2)
    flat = torch.cat([torch.zeros(1), tensor.reshape(-1)])
    every_other = torch.stack([tensor.reshape(-1)] * 2, 1)[:, 0]
    for same in (tensor.to(memory_format=torch.channels_last), flat[1:].view_as(tensor), every_other):
        assert print_of(tensor) == print_of(same)


def test_what_comes_from_a_device_is_waited_for_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    event = mock.Mock()
    monkeypatch.setattr(fingerprint.streams, "timed_event", lambda device: event)
    monkeypatch.setattr(fingerprint.streams, "has_streams", lambda device: True)
    reading = Reading([("it", torch.ones(5))])
    event.synchronize.assert_not_called()
    assert reading.prints() == {"it": print_of(torch.ones(5))}
    event.synchronize.assert_called()


def test_tensors_of_several_devices_are_read_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of inputs: tokens on a GPU, and their lengths on the CPU."""
    read: list[torch.Tensor] = []
    monkeypatch.setattr(fingerprint, "readable", dict)
    monkeypatch.setattr(fingerprint, "Copied", read.append)
    Reading([("here", torch.ones(3)), ("there", torch.ones(3, device="meta"))])
    assert {tensor.device.type for tensor in read} == {"cpu", "meta"}


def test_what_cannot_be_read_is_left_out() -> None:
    freed, there = torch.randn(8, 8), torch.ones(2)
    freed.untyped_storage().resize_(0)
    for tensor in (freed, torch.empty(8, 8, device="meta"), torch.eye(8).to_sparse(), torch.empty(0)):
        assert print_of(tensor) is None
    named = [("freed", freed), ("none", None), ("there", there)]
    assert Reading(named).prints().keys() == {"there"}
