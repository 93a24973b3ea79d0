"""Memory that all ranks of a host have mapped, in which each rank announces its calls and how far it has come.

[Note: control block]
Each rank has a part of its own, which it alone writes and all read:

    begun    the number of collectives whose addend, or other contribution, is complete in shared memory
    done     the number of collectives after which this rank does not touch the others' memory any more
    asleep   1 if a thread of this rank may be asleep. A rank that raises a counter then wakes it. One word is for a
             waiting thread, one for the progress thread
    failed   0, or 1 + the number of the first collective that has failed on this rank, and with it all later ones:
             its caller may use the memory of its contribution again, so that what others read there is not valid
    calls    the last `NUM_CALLS` calls: what is to be done, and where this rank's contribution lies

A collective needs no message: its data, its call and its counters are all in memory. The processor must keep the
order of writes: data before `begun`, results before `done`. x86 does (`ORDERS_WRITES`); others are refused.

A rank that goes to sleep sets `asleep` and then reads the counters; a rank that raises a counter writes it and then
reads `asleep`. Between write and read there has to be a barrier (`fence`), or both would read the old value.
"""

from __future__ import annotations

import array
import mmap
import platform
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

import torch

ORDERS_WRITES = platform.machine() in ("x86_64", "AMD64")
NUM_CALLS = 256  # of one rank that have begun and are not done on all ranks
WORDS_PER_CALL = 6
HEADER_WORDS = 8  # one cache line
WORDS_PER_RANK = HEADER_WORDS + NUM_CALLS * WORDS_PER_CALL
WORD_BYTES = 8
BEGUN, DONE, WAITER_ASLEEP, PROGRESS_ASLEEP, FAILED = range(5)  # words of the header
DTYPES = (  # that can be added in shared memory
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


class Kind(IntEnum):
    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    BARRIER = 4


class Call(NamedTuple):
    """One rank's call of a collective. The first four fields are equal on all ranks."""

    kind: Kind
    dtype: torch.dtype
    numel: int  # of the contribution
    detail: int = 0  # of a broadcast: the source, a rank in the group; of an all-reduce: a checksum of its strides
    segment: int = -1  # where the contribution lies
    offset_bytes: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.BARRIER:
            return "barrier"
        detail = f" from rank {self.detail}" if self.kind is Kind.BROADCAST else ""
        if self.kind is Kind.ALL_REDUCE and self.detail:
            detail = " that are not contiguous"
        return f"{self.kind.name.lower()} of {self.numel:,} elements of {self.dtype}{detail}"


class Counter:
    """A number for each rank of the host. Rank `ours` raises its own; all read all."""

    def __init__(self, words: memoryview, word: int, num_ranks: int, ours: int):
        self._words = words
        self._places = [rank * WORDS_PER_RANK + word for rank in range(num_ranks)]
        self._ours = self._places[ours]

    def raise_to(self, number: int) -> None:
        self._words[self._ours] = number

    def all_reach(self, number: int) -> bool:
        words = self._words
        for place in self._places:  # noqa: SIM110  # a generator takes three times as long
            if words[place] < number:
                return False
        return True

    def poll(self, number: int) -> Callable[[], bool]:
        """As `all_reach`, to be called in a loop."""
        words, places = self._words, [place for place in self._places if place != self._ours]
        if len(places) == 1:
            return lambda: words[places[0]] >= number
        return lambda: min([words[place] for place in places]) >= number

    def behind(self, number: int) -> list[int]:
        """The ranks that have not reached `number`."""
        return [rank for rank, place in enumerate(self._places) if self._words[place] < number]


class ControlBlock:
    """The view of rank `ours` of `num_ranks` on one host."""

    def __init__(self, memory: mmap.mmap, num_ranks: int, ours: int):
        words = memoryview(memory).cast("q")
        self._words = words
        self.begun = Counter(words, BEGUN, num_ranks, ours)
        self.done = Counter(words, DONE, num_ranks, ours)
        self._num_ranks = num_ranks
        self._ours = ours

    @staticmethod
    def nbytes(num_ranks: int) -> int:
        return num_ranks * WORDS_PER_RANK * WORD_BYTES

    def write_call(self, number: int, call: Call) -> None:
        start = self._place(self._ours, number)
        words = array.array("q", (call.kind, DTYPES.index(call.dtype), *call[2:]))
        self._words[start : start + WORDS_PER_CALL] = memoryview(words)

    def call_of(self, rank: int, number: int) -> Call:
        start = self._place(rank, number)
        kind, dtype, *rest = self._words[start : start + WORDS_PER_CALL].tolist()
        return Call(Kind(kind), DTYPES[dtype], *rest)

    def first_difference(self, number: int) -> tuple[int, int] | None:
        """Two ranks whose calls `number` differ, if there are any."""
        first, *others = (self._place(rank, number) for rank in range(self._num_ranks))
        for rank, start in enumerate(others, 1):
            if self._words[start : start + 4] != self._words[first : first + 4]:
                return 0, rank
        return None

    def set_asleep(self, word: int, asleep: bool) -> None:
        """True: from now on this rank is woken. Then check the counters before going to sleep."""
        self._words[self._ours * WORDS_PER_RANK + word] = asleep
        if asleep:
            self.fence()

    def to_wake(self) -> list[int]:
        """The other ranks that may be asleep. Call it after a counter was raised."""
        self.fence()
        ranks, start = [], 0
        for rank in range(self._num_ranks):
            asleep = self._words[start + WAITER_ASLEEP] or self._words[start + PROGRESS_ASLEEP]
            if asleep and rank != self._ours:
                ranks.append(rank)
            start += WORDS_PER_RANK
        return ranks

    def fail_from(self, number: int) -> None:
        """Collective `number` of this rank has failed, and with it all later ones. The first one stays."""
        place = self._ours * WORDS_PER_RANK + FAILED
        self._words[place] = min(number + 1, self._words[place] or number + 1)

    def failed_before(self, number: int) -> Iterator[int]:
        """The other ranks with a failed collective below `number`."""
        for rank in range(self._num_ranks):
            if 0 < self._words[rank * WORDS_PER_RANK + FAILED] <= number and rank != self._ours:
                yield rank

    def fence(self) -> None:
        """A barrier between earlier writes and later reads: taking a lock is one.

        A lock of its own, since a signal handler may interrupt the thread that has a common one.
        """
        with threading.Lock():
            pass

    def _place(self, rank: int, number: int) -> int:
        return rank * WORDS_PER_RANK + HEADER_WORDS + number % NUM_CALLS * WORDS_PER_CALL
