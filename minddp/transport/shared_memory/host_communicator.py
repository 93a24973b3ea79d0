"""One rank's part in the collectives of its host: which thread advances them, and when.

Two things can advance the collectives in flight (`progress_engine.py`), one at a time (`_turn`):

- A thread that waits for a collective. It polls the counters for a while (`spin_wait.py`), then it sleeps until a
  peer raises a counter.
- The progress thread, for a rank that computes, or waits for something else, while others need its part. Waking it
  takes 0.2 ms from a core that is busy with backward, and its additions would take the core for work that is not
  urgent yet. So it sleeps for `progress_delay_s` first, unless somebody waits in C++, for a future, where the
  waiting thread cannot help: then the collective is urgent.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minddp.transport.shared_memory.control_block import PROGRESS_ASLEEP, WAITER_ASLEEP, Call, ControlBlock, Counter
from minddp.transport.shared_memory.peer_sockets import Peer, PeerSockets
from minddp.transport.shared_memory.progress_engine import FOREVER, Collective, ProgressEngine
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import SpinWait

if TYPE_CHECKING:
    from minddp.transport.hierarchical import Lane

PROGRESS_DELAY_S = 0.02  # longer than a wait for the last bucket, which the peers wait for as well
PROGRESS_DELAY_BETWEEN_HOSTS_S = 0.001  # the network should be busy while backward computes
GRACE_S = 10.0  # for a thread to end
MAX_COPY_AT_LAUNCH = 256 * 1024  # bytes; larger contributions are copied by another thread, or by a wait
MESSAGES_EVERY = 64  # collectives, so that a rank that never sleeps still learns of dropped segments
DESTROYED = "The process group was destroyed while this collective was in flight."
_log = logging.getLogger(__name__)
_completing = threading.RLock()


class HostCommunicator:
    """The view of rank `rank` of the host. Ranks are numbered from 0 here; `names` are those for messages."""

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        control: Segment,
        names: Sequence[int],
        spin_wait: SpinWait,
        lane: Lane | None = None,
    ):
        self.progress_delay_s = PROGRESS_DELAY_S if lane is None else PROGRESS_DELAY_BETWEEN_HOSTS_S
        self._engine = ProgressEngine(
            rank, PeerSockets(peers), ControlBlock(control, len(names), rank), names, lane
        )
        self._spin_wait = spin_wait
        self._launching = threading.RLock()
        self._progress = _ProgressThread(self._engine, self.progress_delay_s)
        self._turn = self._progress.turn
        self._progress.start()
        self.end = weakref.finalize(self, self._progress.end)

    # ------------------------------------------------------------------ for any thread

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose collectives need no copies."""
        self._require_no_interruption()
        with self._launching, torch.inference_mode(False):  # so that the progress thread may write to it
            return self._engine.own_memory.create(numel * dtype.itemsize).tensor(dtype, numel)

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
        """Add the collective `steps(engine, number, ours, *arguments)`; begin it if no other thread has the turn.

        Args:
            contribution: of this rank, flat.
            in_place: the contribution may stay where it is if that is shared memory.
            is_waited_for: the caller waits at once.
            is_inference: tensors of `torch.inference_mode` are written.
        """
        self._require_no_interruption()
        engine = self._engine
        with self._launching:
            collective = Collective(engine.num_launched, call, limit_s, is_inference)
            collective.keeps = self
            ours = engine.add(collective, steps, contribution, arguments, in_place)
        if engine.ended:  # no message will wake the progress thread, which finds out whether this can be done
            engine.wake_self()
        # After a failure the progress thread may have ended. A later failure will fail this collective, too.
        has_failed = engine.failure is not None
        copies = 0 if ours.is_callers else ours.tensor.nbytes
        if copies > MAX_COPY_AT_LAUNCH and not is_waited_for and not has_failed:
            self.hurry(collective)
            return collective
        try:
            if not self._in_turn(partial(engine.advance, only_begin=True), GRACE_S if has_failed else 0):
                engine.wake_self()
        finally:
            if not is_waited_for:
                self._progress.take_over()
        return collective

    def hurry(self, collective: Collective) -> None:
        """Let the progress thread advance it without delay."""
        collective.is_urgent = True
        self._progress.urgent.put(None)
        self._engine.wake_self()

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
                # Without the turn: another thread advances
                self._in_turn(partial(self._advance_within, left_s, collective), min(left_s, self.progress_delay_s))
            if collective.number % MESSAGES_EVERY == 0 and not self._turn._is_owned():  # type: ignore[attr-defined]
                self._in_turn(self._engine.receive, 0)
        finally:
            self._progress.take_over()
        if collective.is_done:
            _complete([collective])  # another thread may have finished it, and be busy with callbacks
        return collective.is_done

    def wait_for_all(self) -> None:
        """Wait for the collectives in flight, done or failed."""
        for collective in self._engine.in_flight():
            self.wait_for(collective)

    # ------------------------------------------------------------------ the turn

    def _in_turn(self, advance: Callable[[], list[Collective] | None], limit_s: float) -> bool:
        """Call `advance` and complete the collectives that it has finished; False if another thread has the turn.

        Call `_require_no_interruption` before. The turn is released by one call in C, which raises an error if
        another thread has it: a signal handler that raises may come between any two calls in Python, as inside
        `contextlib.suppress`.
        """
        finished: list[Collective] = []
        has_turn = False
        try:
            if has_turn := self._turn.acquire(timeout=limit_s):
                finished = advance() or []
        finally:
            try:  # noqa: SIM105
                self._turn.release()
            except RuntimeError:
                pass
            _complete(finished)
        return has_turn

    def _require_no_interruption(self) -> None:
        """Raises a RuntimeError if this thread has the turn: a signal handler has interrupted it."""
        if self._turn._is_owned() or self._launching._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "A signal handler uses a process group while it interrupts a collective of the same group, which "
                "cannot go on before the handler returns. Let the handler set a flag, and look at it in the loop."
            )

    def _advance_within(self, limit_s: float, awaited: Collective) -> list[Collective]:
        """Wait until a collective is done, at most `limit_s` seconds. Returns all that are."""
        engine, end = self._engine, time.monotonic() + limit_s
        while True:
            if (finished := engine.advance()) or awaited.is_done:
                return finished
            left_s = end - time.monotonic()
            if left_s <= 0:
                return []
            for first in engine.in_flight()[:1]:
                if isinstance(first.waits_for, Counter):
                    self._spin_wait.spin(first.waits_for.poll(first.until), left_s)
                elif first.waits_for is not None:
                    self._spin_wait.spin(partial(first.waits_for.all_reach, first.until), left_s)
            if engine.can_advance():
                continue
            engine.fail_if_hopeless()  # nothing wakes this thread for a rank whose last message it has read
            engine.control.set_asleep(WAITER_ASLEEP, True)
            try:
                if engine.failure is None and not engine.can_advance():
                    engine.receive(engine.limit_ms(left_s))
            finally:
                engine.control.set_asleep(WAITER_ASLEEP, False)
            if engine.peers.is_closed:
                engine.fail(DESTROYED, reason_for_peers="")


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
    """Refers to the communicator only by collectives in flight, so that an unused one is closed immediately."""

    def __init__(self, engine: ProgressEngine, delay_s: float):
        super().__init__(name="minddp shared memory", daemon=True)
        self.turn = threading.RLock()  # to advance the engine
        self.urgent: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal handler may put while a thread does
        self.will_look = False  # True while it waits out the delay; then it looks at all that is in flight
        self._engine = engine
        self._delay_s = delay_s
        self._process = os.getpid()

    def run(self) -> None:
        engine = self._engine
        limit_ms: float | None = GRACE_S * 1000
        while not engine.peers.is_closed:
            engine.peers.sleep(limit_ms)
            self.will_look = True
            engine.control.set_asleep(PROGRESS_ASLEEP, False)
            with suppress(queue.Empty):
                self.urgent.get(timeout=self._delay_s)
            self.will_look = False
            try:
                limit_ms = self._make_progress()
            except Exception as error:
                self._leave(f"The progress thread of a rank has failed: {error!r}")
        self._leave(DESTROYED, reason_for_peers="")
        engine.peers.close()
        if engine.lane is not None:
            engine.lane.close()

    def take_over(self) -> None:
        """No thread waits now: from here on this one is woken, unless it will look by itself."""
        if self._engine.in_flight() and not self.will_look:
            self._engine.control.set_asleep(PROGRESS_ASLEEP, True)
            if self._engine.can_advance():
                self._engine.wake_self()

    def end(self) -> None:
        if os.getpid() != self._process:  # a forked child has copies of all, but not the thread
            return
        self._engine.peers.shut_down()
        self.urgent.put(None)
        # The garbage collector may call this in this thread, a signal handler in one that has the turn.
        if self is not threading.current_thread() and not self.turn._is_owned():  # type: ignore[attr-defined]
            self.join(GRACE_S)

    def _make_progress(self) -> float | None:
        """Advance everything that can advance. Returns how long the thread may sleep, in milliseconds."""
        engine = self._engine
        with self.turn:  # a waiting thread that has it advances everything meanwhile
            while not self.urgent.empty():
                self.urgent.get()
            engine.receive()
            engine.fail_if_hopeless()
            finished = engine.advance()
            if any(collective.is_urgent for collective in engine.in_flight()):
                self.urgent.put(None)
        if any(collective.is_urgent and collective.when_done for collective in finished):
            # Callbacks of futures may wait for another collective
            thread = threading.Thread(target=_complete, args=(finished,), name="minddp callbacks", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many
                _complete(finished)
        else:
            _complete(finished)
        self.take_over()
        return engine.limit_ms(GRACE_S)  # launching does not wake it, so it looks from time to time

    def _leave(self, error: str, reason_for_peers: str | None = None) -> None:
        with self.turn:  # a thread that waits notices that the sockets are closed
            self._engine.fail(error, reason_for_peers)
            finished = self._engine.advance()
        _complete(finished)
