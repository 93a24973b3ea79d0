"""What a caller holds of a collective in shared memory, and the threads that make it progress.

[Note: progress]
A collective needs a thread on each rank that receives messages, adds, and announces what is done. A progress thread
that does so at once takes the core from backward, and the interpreter lock from its hooks, for work that is not
urgent yet. So *the thread that waits for a collective makes the progress*.

But the main thread may compute for long, or wait for something else, such as a barrier, while other ranks need our
chunks. So there is a progress thread, too: it sleeps until there is news, leaves the main thread the exchange's
`progress_delay_s` to handle it, and then does so itself. To wake it costs 0.2 ms of a core on which backward
computes, so it should wake once in a step rather than at each message. Progress never depends on the order of a
rank's waits; nor does it with gloo, which has threads of its own.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function

from minddp.transport.shared_memory.collective import Collective
from minddp.transport.shared_memory.exchange import Exchange

GRACE_S = 10.0  # for a thread to end


class ProgressEngine:
    """Lets one thread at a time make progress; owns the progress thread, which ends when this object does."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._turn = threading.Lock()
        thread = threading.Thread(
            target=_run_progress_thread, args=(exchange, self._turn), name="minddp shared memory", daemon=True
        )
        thread.start()
        self.end = weakref.finalize(self, _end_progress_thread, exchange, thread)

    def wait_for(self, collective: Collective, limit_s: float) -> bool:
        """Make progress until `collective` is complete; True if it is, within the limit."""
        end = time.monotonic() + limit_s
        while not collective.is_complete and (time_left_s := end - time.monotonic()) > 0:
            if not self._turn.acquire(timeout=min(time_left_s, self._exchange.progress_delay_s)):
                continue  # another thread makes progress
            try:
                while not collective.is_complete and (time_left_s := end - time.monotonic()) > 0:
                    self._exchange.make_progress(time_left_s)
            finally:
                self._turn.release()
        return collective.is_complete


def _run_progress_thread(exchange: Exchange, turn: threading.Lock) -> None:
    while not exchange.is_closed:
        exchange.wait_for_news()
        time.sleep(exchange.progress_delay_s)
        with turn:
            while exchange.make_progress(limit_s=0) and not exchange.is_closed:
                pass
    with turn:
        exchange.leave()


def _end_progress_thread(exchange: Exchange, thread: threading.Thread) -> None:
    exchange.close()
    if thread is not threading.current_thread():  # garbage is collected in any thread
        thread.join(GRACE_S)


class SharedWork:
    """The caller's end of a collective. While torch's profiler runs, it is an event named like gloo's."""

    def __init__(self, collective: Collective, engine: ProgressEngine):
        self._collective = collective
        self._engine = engine
        self._event_has_ended = _record_event(collective) if torch.autograd._profiler_enabled() else None

    def is_completed(self) -> bool:
        return self._collective.is_complete

    def get_future(self) -> torch.futures.Future[Any]:
        """A list of the result, as with torch's works."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        collective = self._collective

        def resolve() -> None:
            if collective.error is None:
                future.set_result([collective.tensor])
            else:
                future.set_exception(RuntimeError(collective.error))

        collective.when_complete(resolve)
        return future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Return once the result is there. A collective that has timed out goes on, and can be waited for again.

        Raises:
            RuntimeError: a peer has ended, or has made another call, or a time limit has passed.
        """
        limit_s = float("inf") if timeout is None else timeout.total_seconds()  # every collective has a deadline
        if not self._engine.wait_for(self._collective, limit_s):
            raise RuntimeError(f"Timed out after {limit_s:g} s of waiting for {self._collective.name}.")
        if self._event_has_ended is not None:
            self._event_has_ended.wait(GRACE_S)
        if self._collective.error is not None:
            raise RuntimeError(self._collective.error)


def _record_event(collective: Collective) -> threading.Event:
    """An event in a profile, from now until `collective` is complete; what is returned is set once it has ended.

    It ends in a thread of its own, which marks it as asynchronous. A waiting thread must also wait for its end: an
    event that outlives the profiler writes to freed memory.
    """
    has_ended = threading.Event()
    completion: Any = torch.futures.Future()
    event = record_function(collective.event_name)
    event.__enter__()
    event._call_end_callbacks_on_future(cast(torch.futures.Future, completion))

    def end() -> None:
        completion.set_result(None)
        has_ended.set()

    collective.when_complete(lambda: threading.Thread(target=end).start())
    return has_ended
