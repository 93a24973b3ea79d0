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


def lay_out(numels: Sequence[int], places: Sequence[int], elements_per_vector: int) -> Layout:
    """Chunks for tensors of `numels` elements that belong to the bucket's elements from `places` on."""
    chunk_elements = THREADS * VECTORS_PER_THREAD * elements_per_vector
    rows: list[tuple[int, int, int, int]] = []
    launches = []
    for first in range(0, len(numels), TENSORS_PER_LAUNCH):
        first_chunk = len(rows)
        stop = min(first + TENSORS_PER_LAUNCH, len(numels))
        for tensor in range(first, stop):
            rows += [
                (start, places[tensor] + start, tensor - first, min(chunk_elements, numels[tensor] - start))
                for start in range(0, numels[tensor], chunk_elements)
            ]
        launches.append(Launch(first, stop, first_chunk, len(rows)))
    return Layout(tuple(launches), np.array(rows, dtype=CHUNK))
