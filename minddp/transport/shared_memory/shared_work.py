"""The caller's handle of an all-reduce in shared memory, and the threads that make it progress.

An all-reduce needs a thread on each rank that receives messages, adds, and announces the chunks that are done. A
thread that did so at once would take the core from backward, and the interpreter lock from its hooks, for work that
is not urgent yet. So *the thread that waits for an all-reduce makes the progress*.

But the main thread may compute for long, or wait for something else, such as a barrier, while other ranks need our
chunks. So there is a progress thread as well: it sleeps until a message arrives, leaves it to the main thread for
`progress_delay_s`, and then handles it. To wake this thread costs 0.2 ms of a core on which backward computes, so
it should wake once in a step rather than at each message. Progress does not depend on the order in which a rank
waits for its all-reduces, as with gloo, which has threads of its own.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function

from minddp.transport.shared_memory.host_communicator import AllReduce, HostCommunicator

GRACE_S = 10.0  # for a thread to end


class ProgressEngine:
    """Lets one thread at a time make progress. Owns the progress thread, which ends with this object."""

    def __init__(self, communicator: HostCommunicator):
        self._communicator = communicator
        self._turn = threading.Lock()
        thread = threading.Thread(
            target=_run_progress_thread, args=(communicator, self._turn), name="minddp shared memory", daemon=True
        )
        thread.start()
        self.end = weakref.finalize(self, _end_progress_thread, communicator, thread)

    def wait_for(self, all_reduce: AllReduce, limit_s: float) -> bool:
        """Make progress until `all_reduce` is done; False if it is not done within the limit."""
        end, is_done = time.monotonic() + limit_s, all_reduce.future.done
        while not is_done() and (time_left_s := end - time.monotonic()) > 0:
            if not self._turn.acquire(timeout=min(time_left_s, self._communicator.progress_delay_s)):
                continue  # another thread makes progress
            try:
                while not is_done() and (time_left_s := end - time.monotonic()) > 0:
                    self._communicator.make_progress(time_left_s)
            finally:
                self._turn.release()
        return is_done()


def _run_progress_thread(communicator: HostCommunicator, turn: threading.Lock) -> None:
    while not communicator.is_closed:
        communicator.wait_for_message()
        time.sleep(communicator.progress_delay_s)
        with turn:
            while communicator.make_progress(limit_s=0) and not communicator.is_closed:
                pass
    with turn:
        communicator.leave()


def _end_progress_thread(communicator: HostCommunicator, thread: threading.Thread) -> None:
    communicator.close()
    if thread is not threading.current_thread():  # the garbage collector runs in any thread
        thread.join(GRACE_S)


class SharedWork:
    """The caller's handle of an all-reduce. While torch's profiler runs, it is an event named like gloo's."""

    def __init__(self, all_reduce: AllReduce, engine: ProgressEngine):
        self._all_reduce = all_reduce
        self._engine = engine
        self._event_has_ended = _record_event(all_reduce) if torch.autograd._profiler_enabled() else None
        self.is_completed = all_reduce.future.done

    def get_future(self) -> torch.futures.Future[Any]:
        return self._all_reduce.future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Return once the sum is available. After a timeout the all-reduce goes on, and may be waited for again.

        Raises:
            RuntimeError: a peer has ended or has made another call, or a time limit has passed.
        """
        limit_s = float("inf") if timeout is None else timeout.total_seconds()  # every all-reduce has a deadline
        is_done = self._engine.wait_for(self._all_reduce, limit_s)
        if not is_done:
            raise RuntimeError(
                f"Timed out after {limit_s:g} s of waiting for all-reduce {self._all_reduce.number}."
            )
        if self._event_has_ended is not None:
            self._event_has_ended.wait(GRACE_S)
        self._all_reduce.future.wait()  # raises its error


def _record_event(all_reduce: AllReduce) -> threading.Event:
    """Record `all_reduce` in the profile, from now until it is done. Returns an event that is set after that.

    It ends in a thread of its own, so that the profiler marks it as asynchronous. A waiting thread must also wait
    for its end: a recorded event that outlives the profiler writes to freed memory.
    """
    has_ended = threading.Event()
    completion: Any = torch.futures.Future()
    event = record_function("gloo:all_reduce")
    event.__enter__()
    event._call_end_callbacks_on_future(cast(torch.futures.Future, completion))

    def end() -> None:
        completion.set_result(None)
        has_ended.set()

    all_reduce.future.add_done_callback(lambda _: threading.Thread(target=end).start())
    return has_ended
