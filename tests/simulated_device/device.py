"""A device that is not there: what is asked of it is computed at once, on the CPU, and its order is checked.

A GPU does not do what it is asked for when it is asked. Three rules decide what is right there, and here they are
checked while a step runs, by what the host has asked for and not by what happens to come out:

    streams    Operations on one stream run in the order in which they were asked for. Operations on two streams run
               in any order, unless an *event* says otherwise: recorded on the one behind the first operation, and
               waited for by the other before the second.

                   default     pack ──●            ●── unpack
                                      │ event      │ event
                   another            └─ all-reduce ┘

               Two accesses to the same bytes that no event orders, one of them a write, are a *race*.

    memory     The allocator gives freed memory away at once, to the stream on which it was allocated, whose next
               operation comes after all earlier ones. So memory that is freed while another stream may yet read or
               write it is an error, unless `record_stream` has named that stream to the allocator.

    host       The host runs ahead. Where it needs a value (`.item()`, `.tolist()`, a copy to or from memory that is
               not pinned, `synchronize`) it waits for a stream, with all that the stream waits for. A *host wait*
               is an error from the beginning of the module's forward to the end of the optimizer's step, if it is
               for anything that the stream of that forward was asked for since then: backward would stand still.

What precedes what is known by vector clocks, those of torch's own race detector for CUDA (`torch.cuda._sanitizer`):
each stream and each event knows the number of the last operation of every stream that surely precedes it.

An access is a range of bytes of a storage, from a tensor's first element to its last: buckets and views overlap.
`operations.py` finds them, `collectives.py` says what process groups do, and `installed.py` puts all of it in the
place of a device. Not modelled: time, copies between devices, sparse tensors, the thread of a device's backward.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.cuda._sanitizer import StreamSynchronizations

ROOT = Path(__file__).resolve().parents[2]
OUR_CODE = (str(ROOT / "minddp"), str(ROOT / "tests"))
SIMULATOR = [
    str(Path(__file__).with_name(name))
    for name in ("device.py", "operations.py", "collectives.py", "nccl_of_cupy.py", "installed.py")
]


class Event:
    """A moment of a stream, as `torch.Event`."""

    def __init__(self, device: SimulatedDevice, *, enable_timing: bool = False):
        self._device = device
        device.events.append(self)  # its clock is found by its address

    def record(self, stream: Stream) -> None:
        self._recorded_s = time.perf_counter()
        self._device.clocks.record_state(id(self), stream.number)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.host_waits("an event", self._device.clocks.recorded_sync_states[id(self)])

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._recorded_s - self._recorded_s)


class Stream:
    """A queue of operations, as `torch.Stream`."""

    def __init__(self, device: SimulatedDevice, name: str):
        self.device = torch.device("cpu")
        self.name = name
        self.number = self.cuda_stream = len(device.streams)
        self._device = device
        device.streams.append(self)
        device.clocks.create_stream(self.number)

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._device.clocks.stream_wait_for_event(self.number, id(event))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


@dataclass(frozen=True)
class Access:
    """An operation's use of the bytes from `start` to `end`, the `number`th operation of all."""

    operation: str
    writes: bool
    start: int
    end: int
    stream: Stream
    number: int
    line: str

    def collides(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.start < other.end and other.start < self.end

    def supersedes(self, other: Access) -> bool:
        """True if what follows this one, and collides with the other, collides with this one, too."""
        covers = self.start <= other.start and other.end <= self.end
        return covers and (self.writes or (self.stream is other.stream and not other.writes))

    def __str__(self) -> str:
        does = f"{self.operation} {'writes' if self.writes else 'reads'} bytes {self.start} to {self.end}"
        return f"{does} on the {self.stream.name} stream ({self.line})"


@dataclass
class Memory:
    """A storage: on which stream it was allocated, what has used it since, and for which streams it is kept.

    `kind` is "device", "host" or "pinned" (memory of the host that the device can copy by itself).
    """

    address: int
    nbytes: int
    stream: Stream
    line: str
    kind: str = "device"
    accesses: list[Access] = field(default_factory=list)
    kept_for: set[Stream] = field(default_factory=set)


Place = tuple[Memory, int, int]  # the bytes of a storage from one to another


class SimulatedDevice:
    """Streams, memory, and what was wrong: `errors`, and `waits` of the host that no step is to contain."""

    def __init__(self) -> None:
        self.clocks = StreamSynchronizations()
        self.streams: list[Stream] = []
        self.events: list[Event] = []
        self.current = Stream(self, "default")
        self.memory: dict[int, Memory] = {}
        self.errors: list[str] = []
        self.waits: list[str] = []
        self._num_operations = 0
        self._forward: tuple[Stream, int] | None = None

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(self, operation: str, stream: Stream, reads: Iterable[Place], writes: Iterable[Place]) -> None:
        """An operation has been asked for on `stream`."""
        self._num_operations += 1
        self.clocks.update_seq_num(stream.number, self._num_operations)
        line = line_of_code()
        for places, is_write in ((reads, False), (writes, True)):
            for memory, start, end in places:
                access = Access(operation, is_write, start, end, stream, self._num_operations, line)
                if memory.kind != "host":
                    self._access(memory, access)

    def _access(self, memory: Memory, access: Access) -> None:
        """Report a race with what has used the memory before, and forget what this use supersedes."""
        left = []
        for earlier in memory.accesses:
            is_ordered = self._precedes(earlier, access.stream)
            if earlier.collides(access) and not is_ordered:
                self._report(f"race: {earlier}; {access}; no event orders them; allocated at {memory.line}")
            if not (is_ordered and access.supersedes(earlier)):
                left.append(earlier)
        memory.accesses = [*left, access]

    def _precedes(self, access: Access, stream: Stream) -> bool:
        return self.clocks.is_ordered_after(stream.number, access.number, access.stream.number)

    def _report(self, error: str) -> None:
        if error not in self.errors:
            self.errors.append(error)

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """That of its storage; what was not known is taken for allocated now, on the current stream."""
        storage = tensor.untyped_storage()
        known = self.memory.get(storage._cdata)
        if known is None:
            known = Memory(storage.data_ptr(), storage.nbytes(), self.current, line_of_code())
            self.memory[storage._cdata] = known
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
        return known

    def place_of(self, tensor: torch.Tensor) -> Place:
        """From its first element to the end of its last one."""
        memory = self.memory_of(tensor)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr() - memory.address
        return memory, start, start + (last + 1) * tensor.element_size()

    def _free(self, key: int) -> None:
        memory = self.memory.pop(key)
        for access in memory.accesses if memory.kind == "device" else ():
            if access.stream not in memory.kept_for and not self._precedes(access, memory.stream):
                self._report(
                    f"freed too early: {access}; the {memory.stream.name} stream, on which this was allocated at "
                    f"{memory.line}, can get it again at once, and no record_stream prevents that"
                )

    def forward_begins(self) -> None:
        """From here on the host is not to wait for what is asked for on the stream that is current."""
        self._forward = (self.current, self._num_operations)

    def step_ends(self) -> None:
        self._forward = None

    def synchronize(self, _device: object = None) -> None:
        self.host_waits("synchronize", {stream.number: self._num_operations for stream in self.streams})

    def host_waits(self, what: str, clock: dict[int, int] | None = None) -> None:
        """The host waits for all that precedes `clock`; by default, for the current stream.

        A thread beside training, such as the guard's, may wait: that holds nothing up.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        clock = clock or self.clocks.current_sync_states[self.current.number]
        if self._forward is not None:
            stream, number = self._forward
            if clock.get(stream.number, 0) > number:
                self.waits.append(f"{what} ({line_of_code()})")
        for state in (*self.clocks.current_sync_states.values(), self.clocks.host_sync_state):
            self.clocks._state_wait_for_other(state, clock)


def line_of_code() -> str:
    """The innermost line of minddp or of a test, but for the simulator."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        file = frame.f_code.co_filename
        if file.startswith(OUR_CODE) and file not in SIMULATOR:
            return f"{file.removeprefix(str(ROOT) + '/')}:{line} {frame.f_code.co_name}"
    return "no line of Python"
