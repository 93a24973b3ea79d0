from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
import torch

from minddp.transport.shared_memory import segments


def num_mapped() -> int:
    return sum("memfd:minddp" in line for line in Path("/proc/self/maps").read_text().splitlines())


def mapped_segment(nbytes: int) -> segments.Segment:
    descriptor = segments.create(nbytes)
    try:
        return segments.attach(descriptor, nbytes, number=0)
    finally:
        os.close(descriptor)


def test_two_mappings_are_one_memory() -> None:
    descriptor = segments.create(4096)
    here, there = (segments.attach(descriptor, 4096, number) for number in range(2))
    os.close(descriptor)
    assert len({segment.tensor(torch.uint8, 1).data_ptr() for segment in (here, there)}) == 2
    here.tensor(torch.float32, 4).copy_(torch.arange(4))
    assert there.tensor(torch.float32, 3, offset_bytes=4).tolist() == [1, 2, 3]


def test_a_tensor_keeps_its_segment_and_nothing_else_does() -> None:
    gc.collect()
    mapped, opened = num_mapped(), len(os.listdir("/proc/self/fd"))
    segment = mapped_segment(1 << 16)
    part = segment.tensor(torch.float32, 1 << 14)[100:200].view(10, 10)
    del segment
    assert num_mapped() == mapped + 1
    assert part.sum() == 0
    del part
    assert (num_mapped(), len(os.listdir("/proc/self/fd"))) == (mapped, opened)


def test_it_has_no_name() -> None:
    segment = mapped_segment(4096)
    assert not [name for name in os.listdir("/dev/shm") if "minddp" in name]
    assert len(segment) == 4096


def test_no_room_is_an_error_at_once() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            segments.create((1 << 20) + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(os.listdir("/proc/self/fd")) == opened
