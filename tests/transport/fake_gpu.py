"""A GPU and NCCL that are not there: streams that run on request, and collectives on the host's memory.

A `FakeGpu` keeps what is enqueued on each stream and runs it later, streams in an order drawn at random, as a
device may: a fence that is missing shows as a wrong value under some seed. Addresses are those of host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

FLOAT32 = 7  # NCCL's own number


class FakeEvent:
    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class FakeStream:
    """A queue of what a device is to do. Events are passed, and waited for, when it comes to them."""

    def __init__(self, gpu: FakeGpu, number: int):
        self.gpu = gpu
        self.cuda_stream = number
        self.queue: list[tuple[str, Any]] = []

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.queue.append(("record", event))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(("wait", event))

    def enqueue(self, kernel: Callable[[], object]) -> None:
        self.queue.append(("kernel", kernel))

    @property
    def can_go_on(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].has_passed)

    def go_on(self) -> None:
        kind, what = self.queue.pop(0)
        if kind == "record":
            what.has_passed = True
        elif kind == "kernel":
            what()


class FakeGpu:
    """Streams by number; the caller's is number 1."""

    def __init__(self) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.current = self.new_stream()
        self.is_capturing = False
        self.kept: list[tuple[int, int]] = []  # (address, stream) of `record_stream`

    def new_stream(self, _device: object = None) -> FakeStream:
        stream = FakeStream(self, len(self.streams) + 1)
        self.streams[stream.cuda_stream] = stream
        return stream

    def run(self, seed: int = 0) -> None:
        """Do all that can be done, always by some stream that can go on."""
        rng = random.Random(seed)
        while ready := [stream for stream in self.streams.values() if stream.can_go_on]:
            rng.choice(ready).go_on()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put this in the place of torch.cuda, as far as the transport uses it."""
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, s: self.kept.append((tensor.data_ptr(), s.cuda_stream))
        )


class FakeNcclError(RuntimeError):
    pass


class FakeNccl:
    """Looks like `cupy.cuda.nccl` and adds up float32 between `world_size` threads, each with a FakeGpu of its own.

    `calls[rank]` lists what was called, in order. A kernel waits for its peers' kernels of the same number.
    """

    NCCL_SUM = 0
    NCCL_FLOAT32, NCCL_FLOAT16, NCCL_INT64, NCCL_UINT8 = FLOAT32, 6, 4, 1
    available = True

    def __init__(self, gpus: list[FakeGpu]):
        self.gpus = gpus
        self.world_size = len(gpus)
        self.calls: list[list[tuple[Any, ...]]] = [[] for _ in gpus]
        self.async_error: str | None = None
        self.refuses: str | None = None
        self.wire: dict[tuple[int, int], np.ndarray] = {}
        self.meeting = threading.Barrier(self.world_size)
        self.unique_ids = 0
        self.here = threading.local()

    def get_unique_id(self) -> bytes:
        self.unique_ids += 1
        return bytes(range(127, 255))

    def NcclCommunicator(self, world_size: int, unique_id: bytes, rank: int) -> FakeHandle:
        assert world_size == self.world_size
        assert len(unique_id) == 128
        return FakeHandle(self, rank, unique_id)


class FakeHandle:
    def __init__(self, nccl: FakeNccl, rank: int, unique_id: bytes):
        self.nccl, self.rank, self.unique_id = nccl, rank, unique_id
        self.number = 0
        self.ended_by: str | None = None

    def _call(self, name: str, *args: Any) -> None:
        self.nccl.here.rank = self.rank
        if self.nccl.refuses:
            raise FakeNcclError(self.nccl.refuses)
        self.nccl.calls[self.rank].append((name, *args))

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("allReduce", count, dtype, op, stream)
        assert source == target, "in place"
        assert op == FakeNccl.NCCL_SUM
        self.number += 1

        def kernel(number: int = self.number) -> None:
            everyone = self._exchange(number, memory(target, count).copy())
            summed = np.sum(everyone, axis=0, dtype=np.float32)
            memory(target, count)[:] = summed

        self.nccl.gpus[self.rank].streams[stream].enqueue(kernel)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._call("broadcast", count, dtype, root, stream)
        self.number += 1

        def kernel(number: int = self.number) -> None:
            memory(target, count)[:] = self._exchange(number, memory(source, count).copy())[root]

        self.nccl.gpus[self.rank].streams[stream].enqueue(kernel)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        self._call("allGather", count, dtype, stream)
        self.number += 1

        def kernel(number: int = self.number) -> None:
            everyone = self._exchange(number, memory(source, count).copy())
            memory(target, count * len(everyone))[:] = np.concatenate(everyone)

        self.nccl.gpus[self.rank].streams[stream].enqueue(kernel)

    def _exchange(self, number: int, ours: np.ndarray) -> list[np.ndarray]:
        self.nccl.wire[number, self.rank] = ours
        self.nccl.meeting.wait(60)
        return [self.nccl.wire[number, rank] for rank in range(self.nccl.world_size)]

    def check_async_error(self) -> None:
        if self.nccl.async_error:
            raise FakeNcclError(self.nccl.async_error)

    def abort(self) -> None:
        self.ended_by = "abort"

    def destroy(self) -> None:
        self.ended_by = "destroy"


def memory(address: int, count: int) -> np.ndarray:
    """float32 elements at an address."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
