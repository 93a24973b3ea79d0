"""How gradients are cut up, so that every block of threads has about as much to do: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

THREADS = 256  # of a block
VECTORS_PER_THREAD = 4  # so that a thread has as many loads under way before it stores
TENSORS_PER_LAUNCH = 480  # addresses of 8 bytes, in the 4 KiB that a kernel's arguments may take

#: As the kernel's `struct Chunk`: `count` elements from `start` of the launch's tensor number `tensor`. In the
#: bucket they lie from element `place` on.
CHUNK = np.dtype([("start", np.int64), ("place", np.int64), ("tensor", np.int32), ("count", np.int32)])


@dataclass(frozen=True)
class Launch:
    """One launch: tensors `first` to `stop`, whose chunks are rows `first_chunk` to `stop_chunk` of the table."""

    first: int
    stop: int
    first_chunk: int
    stop_chunk: int


@dataclass(frozen=True)
class Layout:
    """All launches that a bucket takes, and the table of chunks, a structured array of dtype `CHUNK`."""

    launches: tuple[Launch, ...]
    chunks: np.ndarray


def vector_elements(*itemsizes: int) -> int:
    """How many elements a thread moves at once: 16 bytes of the wider type."""
    return 16 // max(itemsizes)


def lay_out(numels: Sequence[int], elements_per_vector: int) -> Layout:
    """Chunks for tensors of `numels` elements that lie in the bucket one after another, without gaps."""
    chunk_elements = THREADS * VECTORS_PER_THREAD * elements_per_vector
    rows: list[tuple[int, int, int, int]] = []
    launches = []
    place = 0
    for first in range(0, len(numels), TENSORS_PER_LAUNCH):
        first_chunk = len(rows)
        of_launch = numels[first : first + TENSORS_PER_LAUNCH]
        for tensor, numel in enumerate(of_launch):
            rows += [
                (start, place + start, tensor, min(chunk_elements, numel - start))
                for start in range(0, numel, chunk_elements)
            ]
            place += numel
        launches.append(Launch(first, first + len(of_launch), first_chunk, len(rows)))
    return Layout(tuple(launches), np.array(rows, dtype=CHUNK))
