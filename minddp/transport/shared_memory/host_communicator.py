"""One rank's part in the collectives of its host: it begins them in order, advances them, and fails them together.

A collective in flight is a generator (`collectives.py`) that waits for a counter. Two things can advance it, one at
a time (`_turn`):

- A thread that waits for a collective. It polls the counters for a while (`spin_wait.py`), then it sleeps until a
  peer raises a counter.
- The progress thread, for a rank that computes, or waits for something else, while others need its part. To wake it
  costs 0.2 ms of a core on which backward computes, and its additions would take the core for work that is not
  urgent yet. So it sleeps for `progress_delay_s` first, unless somebody waits in C++, for a future, where the
  waiting thread cannot help: then the collective is urgent.

When a process ends, by whatever signal, its descriptor wakes all peers. A rank that leaves gives its reason. A rank
that is only slow has the time limit of the collective.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from minddp.platform import wording
from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.control_block import (
    NUM_CALLS,
    PROGRESS_ASLEEP,
    WAITER_ASLEEP,
    Call,
    ControlBlock,
    Counter,
)
from minddp.transport.shared_memory.peer_sockets import (
    Ended,
    Leaving,
    Message,
    Peer,
    PeerSockets,
    SegmentCreated,
    SegmentDropped,
)
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import SpinWait

SAME_CALLS = "All ranks must make the same calls in the same order."
PROGRESS_DELAY_S = 0.02  # longer than a wait for the last bucket, which the peers wait for as well
PROGRESS_DELAY_BETWEEN_HOSTS_S = 0.001  # the network should be busy while backward computes
GRACE_S = 10.0  # for a thread to end, and for a peer to receive a message
MAX_COPY_AT_LAUNCH = 256 * 1024  # bytes; larger contributions are copied by another thread, or by a wait
MESSAGES_EVERY = 64  # collectives: then a rank that never has to sleep reads which segments were dropped
NOTHING = torch.empty(0)
FOREVER = float("inf")
DESTROYED = "The process group was destroyed while this collective was in flight."
_log = logging.getLogger(__name__)
_completing = threading.RLock()


class Contribution(NamedTuple):
    """Where a rank's contribution lies in its shared memory, and the call that says so."""

    call: Call
    tensor: torch.Tensor  # flat
    segment: Segment | None
    is_callers: bool  # it is the caller's tensor itself, not a copy


class Awaited(Protocol):
    """What collective `number - 1` waits for: a counter, or a chunk on its way between hosts."""

    def all_reach(self, number: int) -> bool: ...

    def poll(self, number: int) -> Callable[[], bool]:
        """The same, to be called in a loop."""

    def behind(self, number: int) -> list[int]:
        """The ranks of this host that it waits for."""


class Earlier:
    """Collectives of this rank that a barrier waits for."""

    def __init__(self, collectives: Sequence[Collective]):
        self._collectives = collectives

    def all_reach(self, number: int) -> bool:
        return all(collective.has_begun and collective.waits_for is None for collective in self._collectives)

    def poll(self, number: int) -> Callable[[], bool]:
        return partial(self.all_reach, number)

    def behind(self, number: int) -> list[int]:
        """None: if one of them cannot be done, it comes first."""
        return []


class Closeable(Protocol):
    """The connection to other hosts, which ends with the one to the ranks of this host."""

    def close(self, grace_s: float = ...) -> None: ...


class PeerFailed(Exception):
    """The reason why another rank has failed."""


class Collective:
    """A collective in flight. Once `is_done`, `error` is its error, if it has one."""

    def __init__(self, number: int, call: Call, limit_s: float):
        self.number = number
        self.call = call
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.steps: Any = None
        self.has_begun = False
        self.waits_for: Awaited | None = None  # until that reaches `until`
        self.until = number - NUM_CALLS + 1  # it begins once its place in the control block is free
        self.is_inference = False
        self.is_urgent = False  # the progress thread is not to hesitate
        self.is_done = False
        self.error: str | None = None
        self.when_done: list[Callable[[Collective], object]] | None = []  # `None` once they have been called

    def __str__(self) -> str:
        return f"{self.call.kind.name.lower()} {self.number}"


class _Flag:
    """An event that a signal handler may set, though it interrupts a thread that sets it."""

    def __init__(self) -> None:
        self._not_set = threading.Lock()
        self._not_set.acquire()

    def set(self) -> None:
        try:  # noqa: SIM105
            self._not_set.release()
        except RuntimeError:  # it is set
            pass

    def clear(self) -> None:
        self._not_set.acquire(blocking=False)

    def wait(self, limit_s: float) -> None:
        """For one thread."""
        if self._not_set.acquire(timeout=limit_s):
            self.set()


class HostCommunicator:
    """The view of rank `rank` of the host. Ranks are numbered from 0 here; `names` are those for messages."""

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        control: Segment,
        names: Sequence[int],
        spin_wait: SpinWait,
        lane: Closeable | None = None,
    ):
        self.rank = rank
        self.num_ranks = len(peers) + 1
        self.lane = lane
        self.progress_delay_s = PROGRESS_DELAY_S if lane is None else PROGRESS_DELAY_BETWEEN_HOSTS_S
        self._names = names
        self._control = ControlBlock(control, self.num_ranks, rank)
        self.begun, self.done = self._control.begun, self._control.done
        self._peers = PeerSockets(peers)
        self.wake_self = self._peers.wake_self
        self._spin_wait = spin_wait

        # Collectives of this rank
        self._num_launched = 0
        self._in_flight: dict[int, Collective] = {}  # by number, in order
        self._num_done = 0
        self._done_early: set[int] = set()  # numbers above `_num_done`
        self._failure: str | None = None  # the error of every collective from now on
        self._ended: dict[int, Leaving | Ended] = {}  # ranks that join no further collective

        # Memory
        self._ours: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # ours, by address
        self._num_created = 0
        self._dropped: deque[int] = deque()  # numbers of freed segments that the peers have not unmapped yet
        self._staging: list[tuple[Segment, Collective]] = []  # with the one that used it last
        self._theirs: dict[tuple[int, int], Segment] = {}  # by rank and number

        self._launching = threading.RLock()
        self._turn = threading.RLock()  # always taken by `_take_turn`
        self._urgent = _Flag()
        self._progress = _ProgressThread(self, self._control, self._peers, self._urgent)
        self._progress.start()
        self.end = weakref.finalize(self, self._progress.end)

    # ------------------------------------------------------------------ for any thread

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose collectives need no copies."""
        self._require_no_interruption()
        with self._launching, torch.inference_mode(False):  # so that the progress thread may write to it
            return self._create_segment(numel * dtype.itemsize).tensor(dtype, numel)

    def launch(
        self,
        steps: Callable[..., Any],
        call: Call,
        contribution: torch.Tensor | None,
        *arguments: Any,
        limit_s: float,
        in_place: bool,
        is_waited_for: bool,
        is_inference: bool = False,
    ) -> Collective:
        """Begin the collective `steps(self, number, ours, *arguments)`.

        Args:
            contribution: of this rank, flat.
            in_place: the contribution may stay where it is if that is shared memory.
            is_waited_for: the caller waits at once.
            is_inference: tensors of `torch.inference_mode` are written.
        """
        self._require_no_interruption()
        with self._launching:
            number = self._num_launched
            collective = Collective(number, call, limit_s)
            try:
                while self._dropped:
                    self._peers.send(SegmentDropped(self._dropped.popleft()), limit_s=limit_s)
                ours = self._contribute(collective, contribution, in_place)
            except RuntimeError as error:  # the peers wait for this collective
                self._fail(str(error))
                raise
            collective.is_inference = is_inference
            collective.steps, collective.waits_for = steps(self, number, ours, *arguments), self.done
            self._in_flight[number] = collective
            self._num_launched += 1
        if self._ended:  # no message will wake the progress thread, which finds out whether this can be done
            self._peers.wake_self()
        # After a failure the progress thread may have ended. A later failure comes across this collective.
        has_failed = self._failure is not None
        copies = 0 if ours.is_callers else ours.tensor.nbytes
        if copies > MAX_COPY_AT_LAUNCH and not is_waited_for and not has_failed:
            self.hurry(collective)
            return collective
        finished: list[Collective] = []
        try:
            if self._turn.acquire(timeout=GRACE_S if has_failed else 0):
                finished = self._advance(only_begin=True)
            else:
                self._peers.wake_self()
        finally:
            try:  # noqa: SIM105
                self._turn.release()
            except RuntimeError:
                pass
            _complete(finished)
            if not is_waited_for:
                self._hand_over()
        return collective

    def hurry(self, collective: Collective) -> None:
        """Let the progress thread advance it without delay."""
        collective.is_urgent = True
        self._urgent.set()
        self._peers.wake_self()

    def call_when_done(
        self, collective: Collective, call: Callable[[Collective], object], is_urgent: bool = True
    ) -> None:
        """Call it in the thread that completes the collective; if urgent, the progress thread does not hesitate."""
        with _completing:
            is_completed = collective.when_done is None
            if collective.when_done is not None:
                collective.is_urgent = collective.is_urgent or is_urgent
                collective.when_done.append(call)
        if is_completed:
            call(collective)
        elif is_urgent:
            self.hurry(collective)

    def wait_for(self, collective: Collective, limit_s: float = FOREVER) -> bool:
        """Advance until `collective` is done; False if it is not done within the limit."""
        end = time.monotonic() + limit_s
        if not collective.is_done:
            self._require_no_interruption()
        try:
            while not collective.is_done and (left_s := end - time.monotonic()) > 0:
                finished: list[Collective] = []
                try:
                    if self._turn.acquire(timeout=min(left_s, self.progress_delay_s)):  # else another advances
                        finished = self._advance_within(left_s, collective)
                finally:
                    try:  # noqa: SIM105
                        self._turn.release()
                    except RuntimeError:
                        pass
                    _complete(finished)
            if collective.number % MESSAGES_EVERY == 0 and not self._turn._is_owned():  # type: ignore[attr-defined]
                try:
                    if self._turn.acquire(timeout=0):
                        self._handle(self._peers.poll(0))
                finally:
                    try:  # noqa: SIM105
                        self._turn.release()
                    except RuntimeError:
                        pass
        finally:
            self._hand_over()
        if collective.is_done:
            _complete([collective])  # another thread may have finished it, and be busy with callbacks
        return collective.is_done

    def wait_for_all(self) -> None:
        """Wait for the collectives in flight, done or failed."""
        for collective in list(self._in_flight.values()):
            self.wait_for(collective)

    # ------------------------------------------------------------------ for a collective

    def begin(self, number: int, ours: Contribution) -> Counter:
        """This rank's contribution is complete."""
        self._control.write_call(number, ours.call)
        self.begun.raise_to(number + 1)
        self._wake()
        return self.begun

    def contributions(self, number: int, ours: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """Elements `start` to `stop` of the contribution of each rank; this rank's own are those of `ours`."""
        return [
            ours[start:stop] if rank == self.rank else self.contribution(number, rank, start, stop)
            for rank in range(self.num_ranks)
        ]

    def contribution(self, number: int, rank: int, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the contribution of another rank."""
        call = self._control.call_of(rank, number)
        if (rank, call.segment) not in self._theirs:  # its message came before the call
            self._handle(self._peers.poll(0))
        segment = self._theirs[rank, call.segment]
        return segment.tensor(call.dtype, stop - start, call.offset_bytes + start * call.dtype.itemsize)

    def finish(self, number: int) -> None:
        """This rank touches no memory of the others any more. The counter is raised in the order of numbers.

        Raises:
            PeerFailed: a rank has failed before this collective was done there. Its memory, which this rank has
                read, may have been in use again.
        """
        self._require_no_failure(number)
        self._done_early.add(number)
        while self._num_done in self._done_early:
            self._done_early.remove(self._num_done)
            self._num_done += 1
        self.done.raise_to(self._num_done)
        self._wake()

    def _wake(self) -> None:
        if asleep := self._control.to_wake():
            self._peers.wake(asleep)

    def earlier(self, number: int) -> Earlier:
        """The collectives of this rank before `number` that are in flight."""
        return Earlier([other for other in list(self._in_flight.values()) if other.number < number])

    def _require_no_interruption(self) -> None:
        """Call it before each `try` that takes the turn.

        Its `finally` releases the turn by one call in C, and ignores the error if another thread has it: a signal
        handler that raises may come between any two calls in Python, as inside `contextlib.suppress`.
        """
        if self._turn._is_owned() or self._launching._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "A signal handler uses a process group while it interrupts a collective of the same group, which "
                "cannot go on before the handler returns. Let the handler set a flag, and look at it in the loop."
            )

    # ------------------------------------------------------------------ for the thread whose turn it is

    def _advance_within(self, limit_s: float, awaited: Collective) -> list[Collective]:
        """Wait until a collective is done, at most `limit_s` seconds. Returns all that are."""
        end = time.monotonic() + limit_s
        while True:
            if (finished := self._advance()) or awaited.is_done:
                return finished
            left_s = end - time.monotonic()
            if left_s <= 0:
                return []
            for first in list(self._in_flight.values())[:1]:
                if first.waits_for is not None:
                    self._spin_wait.spin(first.waits_for.poll(first.until), left_s)
            if self._can_advance():
                continue
            self._fail_if_hopeless()  # nothing wakes this thread for a rank whose last message it has read
            self._control.set_asleep(WAITER_ASLEEP, True)
            try:
                if self._failure is None and not self._can_advance():
                    self._handle(self._peers.poll(self._limit_ms(left_s)))
            finally:
                self._control.set_asleep(WAITER_ASLEEP, False)
            if self._peers.is_closed:
                self._fail(DESTROYED, reason_for_peers="")

    def _advance(self, only_begin: bool = False) -> list[Collective]:
        """Take every step that is possible now. Returns the collectives that are done."""
        finished: list[Collective] = []
        blocked: Awaited | None = None  # a counter reaches the numbers of those that have begun in order
        try:
            for collective in list(self._in_flight.values()):
                if collective.has_begun and (only_begin or collective.waits_for is blocked is not None):
                    continue
                if self._failure is None and self._step(collective, only_begin):
                    finished.append(collective)
                blocked = collective.waits_for
                if not collective.has_begun:
                    break  # the later ones begin after it
                if collective.waits_for is self.begun:
                    only_begin = True  # those of a lane must be called in one order on all its ranks
        except PeerFailed as failure:
            self._fail(str(failure))
        except BaseException as error:  # half a result is useless, and a second attempt would add twice
            reason = error if isinstance(error, RuntimeError) else repr(error)
            self._fail(f"Rank {self._names[self.rank]} cannot continue its collectives: {reason}")
            if not isinstance(error, Exception):
                raise
        if self._failure is not None:
            for collective in list(self._in_flight.values()):
                if collective not in finished:
                    collective.error = self._failure
                    finished.append(collective)
        for collective in finished:
            collective.steps, collective.is_done = None, True
            del self._in_flight[collective.number]
        return finished

    def _step(self, collective: Collective, only_begin: bool) -> bool:
        """True if the collective is done."""
        while (waits_for := collective.waits_for) is not None and waits_for.all_reach(collective.until):
            if waits_for is self.begun:
                self._require_same_call(collective.number)
                self._require_no_failure(collective.number)  # this rank may write into the memory of the others
            if collective.is_inference:
                with torch.inference_mode():  # each thread has a mode of its own
                    collective.waits_for = next(collective.steps, None)
            else:
                collective.waits_for = next(collective.steps, None)
            collective.has_begun, collective.until = True, collective.number + 1
            if only_begin:
                break
        return collective.waits_for is None

    def _can_advance(self) -> bool:
        blocked = None
        for collective in list(self._in_flight.values()):
            waits_for = collective.waits_for
            if collective.has_begun and waits_for is blocked is not None:
                continue
            if waits_for is None or waits_for.all_reach(collective.until):  # `None`: another thread completes it
                return True
            blocked = waits_for
            if not collective.has_begun:
                break
        return False

    def _require_no_failure(self, number: int) -> None:
        for rank in self._control.failed_before(number + 1):
            self._handle(self._peers.poll(0))  # its message came before
            last_message = self._ended.get(rank, Ended())
            raise PeerFailed(self._reason(self._names[rank], last_message, f"collective {number}"))

    def _require_same_call(self, number: int) -> None:
        if (ranks := self._control.first_difference(number)) is not None:
            calls = [f"rank {self._names[rank]} calls {self._control.call_of(rank, number)}" for rank in ranks]
            raise RuntimeError(f"In collective {number} {', but '.join(calls)}. {SAME_CALLS}")

    def _handle(self, events: Sequence[tuple[int, int]]) -> None:
        for rank, message, descriptors in self._peers.receive(events):
            self._handle_message(rank, message, descriptors)

    def _handle_message(self, rank: int, message: Message, descriptors: Sequence[int]) -> None:
        match message:
            case SegmentCreated():
                self._map(rank, message, descriptors)
            case SegmentDropped():
                self._theirs.pop((rank, message.number), None)
            case Leaving() | Ended():
                self._ended.setdefault(rank, message)
                self._peers.disconnect(rank)

    def _map(self, rank: int, message: SegmentCreated, descriptors: Sequence[int]) -> None:
        reason: object = None if descriptors else "too many files are open (raise the limit: ulimit -n)"
        for descriptor in descriptors:  # one
            try:
                segment = segments.attach(descriptor, message.nbytes, message.number)
                self._theirs[rank, message.number] = segment
            except (OSError, ValueError) as error:
                reason = error
            finally:
                os.close(descriptor)
        if reason is not None:
            self._fail(f"Rank {self._names[self.rank]} cannot map memory of rank {self._names[rank]}: {reason}")

    def _limit_ms(self, limit_s: float) -> float | None:
        """The time to sleep in milliseconds: at most `limit_s`, and until the first deadline."""
        for first in list(self._in_flight.values())[:1]:
            left_s = first.deadline - time.monotonic()
            limit_s = min(limit_s, left_s if left_s > 0 else GRACE_S)  # a chunk between hosts may last longer
        return None if limit_s == FOREVER else max(limit_s, 0) * 1000

    def _fail_if_hopeless(self) -> None:
        """Fail if the first collective can never be done."""
        first = next(iter(list(self._in_flight.values())), None)
        if first is None or first.waits_for is None:
            return
        behind = first.waits_for.behind(first.until)
        for rank in behind:
            if rank in self._ended:
                self._fail(self._reason(self._names[rank], self._ended[rank], str(first)))
                return
        if time.monotonic() < first.deadline or not behind or not isinstance(first.waits_for, Counter):
            return
        late = wording.subject([self._names[rank] for rank in behind], "has", "have")
        if not first.has_begun:
            self._fail(
                f"{late} still to finish collective {first.until - 1}, {NUM_CALLS} before {first}, after "
                f"{first.limit_s:g} s. {SAME_CALLS}"
            )
        elif first.waits_for is self.begun:
            self._fail(f"{late} not begun {first} within the timeout of {first.limit_s:g} s. {SAME_CALLS}")
        else:
            self._fail(
                f"{late} begun {first} and not finished it within the timeout of {first.limit_s:g} s: a process is "
                f"stopped, or waits for another host."
            )

    def _reason(self, name: int, last_message: Leaving | Ended, what: str) -> str:
        match last_message:
            case Ended():
                return (
                    f"Rank {name} has ended before {what} was done: its process has exited or was killed. Its "
                    f"output or exit code shows why (a crash, out of memory, a signal). Start all ranks again."
                )
            case Leaving(""):
                return (
                    f"Rank {name} has left before {what} was done: the process has ended, or its process group "
                    f"was destroyed. {SAME_CALLS}"
                )
            case Leaving(reason):  # the failure of that rank, or one that it has heard of
                return reason

    def _fail(self, error: str, reason_for_peers: str | None = None) -> None:
        """Every collective in flight, and every later one, has this error. PeerSockets receive the first reason."""
        if self._failure is None:
            self._failure = error
            self._peers.leave(error if reason_for_peers is None else reason_for_peers)
            if reason_for_peers is None or self._in_flight:
                self._control.fail_from(min(list(self._in_flight), default=self._num_launched))
            self.wake_self()  # a thread that waits for one of them
            if self.lane is not None:
                self.lane.close(0.0)

    # ------------------------------------------------------------------ memory

    def _contribute(self, collective: Collective, tensor: torch.Tensor | None, in_place: bool) -> Contribution:
        """Where this rank's contribution lies: in `tensor` itself, if that is shared memory, or in a copy."""
        call = collective.call
        if tensor is None:
            return Contribution(call, NOTHING, None, True)
        address = tensor.untyped_storage().data_ptr()
        if in_place and (segment := self._ours.get(address)) is not None:
            call = call._replace(segment=segment.number, offset_bytes=tensor.data_ptr() - address)
            return Contribution(call, tensor, segment, True)
        segment = self._staging_segment(collective, tensor.nbytes)
        with torch.inference_mode(False):  # so that the progress thread may write to it
            copy = segment.tensor(tensor.dtype, tensor.numel())
        return Contribution(call._replace(segment=segment.number), copy, segment, False)

    def _staging_segment(self, collective: Collective, nbytes: int) -> Segment:
        """A segment that no collective uses any more, on any rank, or a new one.

        On this rank `is_done` says so: it may have to copy the result once all the others are done.
        """
        for index, (segment, last) in enumerate(self._staging):
            if len(segment) >= nbytes and last.is_done and self.done.all_reach(last.number + 1):
                del self._staging[index]
                break
        else:
            segment = self._create_segment(segments.staging_bytes(nbytes))
        self._staging.append((segment, collective))
        return segment

    def _create_segment(self, nbytes: int) -> Segment:
        try:
            descriptor = segments.create(nbytes)
            try:
                segment = segments.attach(descriptor, nbytes, self._num_created)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise RuntimeError(
                f"Rank {self._names[self.rank]} has no room for {nbytes:,} bytes of shared memory: {error}. Give "
                f'the job more memory, or use gloo alone: backend="gloo", and transport="process_group".'
            ) from error
        try:
            self._num_created += 1
            self._peers.send(SegmentCreated(segment.number, nbytes), [descriptor], limit_s=GRACE_S)
        finally:
            os.close(descriptor)
        self._ours[torch.frombuffer(segment, dtype=torch.uint8).data_ptr()] = segment
        weakref.finalize(segment, self._dropped.append, segment.number)
        return segment

    # ------------------------------------------------------------------ the progress thread

    def _hand_over(self) -> None:
        """No thread waits now: from here on the progress thread is woken, unless it will look by itself."""
        if self._in_flight and not self._progress.will_look:
            self._control.set_asleep(PROGRESS_ASLEEP, True)
            if self._can_advance():
                self._peers.wake_self()

    def take_turn(self) -> float | None:
        """Advance what can be. Returns how long the thread may sleep, in milliseconds."""
        with self._turn:  # else a thread waits for a collective, and advances all
            self._urgent.clear()
            self._handle(self._peers.poll(0))
            self._fail_if_hopeless()
            finished = self._advance()
            if any(collective.is_urgent for collective in list(self._in_flight.values())):
                self._urgent.set()
        if any(collective.is_urgent and collective.when_done for collective in finished):
            # Callbacks of futures may wait for another collective
            thread = threading.Thread(target=_complete, args=(finished,), name="minddp callbacks", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many
                _complete(finished)
        else:
            _complete(finished)
        self._hand_over()
        return self._limit_ms(GRACE_S)  # nothing wakes it when a collective that nobody waits for is launched

    def leave(self, error: str, reason_for_peers: str | None = None) -> None:
        with self._turn:  # a thread that waits notices that the sockets are closed
            self._fail(error, reason_for_peers)
            finished = self._advance()
        _complete(finished)


def _complete(finished: Sequence[Collective]) -> None:
    for collective in finished:
        with _completing:
            calls, collective.when_done = collective.when_done or [], None
        for call in calls:
            try:
                call(collective)
            except Exception:
                _log.exception("A callback of %s has raised.", collective)


class _ProgressThread(threading.Thread):
    """Has no reference to the host while it sleeps, so that a host that nobody uses is closed at once."""

    def __init__(self, host: HostCommunicator, control: ControlBlock, peers: PeerSockets, urgent: _Flag):
        super().__init__(name="minddp shared memory", daemon=True)
        self._host = weakref.ref(host)
        self._control = control
        self._peers = peers
        self._urgent = urgent
        self._delay_s = host.progress_delay_s
        self._lane = host.lane
        self._process = os.getpid()
        self.will_look = False  # True: within the delay, at all that is in flight by then

    def run(self) -> None:
        limit_ms: float | None = None
        while not self._peers.is_closed:
            self._peers.sleep(limit_ms)
            self.will_look = True
            self._control.set_asleep(PROGRESS_ASLEEP, False)
            self._urgent.wait(self._delay_s)
            self.will_look = False
            if (host := self._host()) is not None:
                try:
                    limit_ms = host.take_turn()
                except Exception as error:
                    host.leave(f"The progress thread of a rank has failed: {error!r}")
            del host
        if (host := self._host()) is not None:
            host.leave(DESTROYED, reason_for_peers="")
        self._peers.leave("")
        self._peers.close()
        if self._lane is not None:
            self._lane.close()

    def end(self) -> None:
        if os.getpid() != self._process:  # a forked child has copies of all, but not the thread
            return
        self._peers.shut_down()
        if self is not threading.current_thread():  # the garbage collector runs in any thread, also in this one
            self._urgent.set()
            self.join(GRACE_S)
