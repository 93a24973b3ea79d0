"""One rank's end of a communicator: a stream, calls that enqueue on it, a thread that notices if it is stuck."""

from __future__ import annotations

import ctypes
import datetime
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

_log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
CALL_GRACE_S = 5.0  # how long a call may go on before it counts as stuck, too
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


class Communicator:
    """Enqueues NCCL's calls on a stream of its own. See [Note: fences] and [Note: what no call can tell].

    `handle` is CuPy's `NcclCommunicator`, `on_device()` makes the device current for CuPy. A collective that is not
    complete after `limit_s` seconds is given up. `trouble` says what has gone wrong; `None` if nothing has.
    """

    def __init__(
        self,
        handle: Any,
        device: torch.device,
        on_device: Callable[[], AbstractContextManager[Any]],
        limit_s: float,
    ):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.trouble: str | None = None
        self._handle = handle
        self._on_device = on_device
        self._limit_s = limit_s
        self._one_call_at_a_time = threading.Lock()  # forward and backward call from threads of their own
        self._under_way: deque[UnderWay] = deque()
        stop = threading.Event()
        watched = weakref.ref(self)
        looks = threading.Thread(
            target=_look_after, args=(watched, stop, on_device), name="minddp-nccl", daemon=True
        )
        looks.start()
        weakref.finalize(self, _close, stop, handle, on_device, self._under_way)

    def launch(
        self, operation: str, tensors: Sequence[torch.Tensor], enqueue: Callable[[Any, int], object]
    ) -> NcclWork:
        """Have `enqueue(handle, stream)` make the NCCL calls of one collective on `tensors`; returns at once.

        Raises:
            RuntimeError: NCCL refuses, or the communicator was given up earlier.
        """
        self.raise_if_in_trouble()
        ready = torch.cuda.current_stream(self.device).record_event()
        self.stream.wait_event(ready)
        try:
            with self._one_call_at_a_time, self._on_device():
                enqueue(self._handle, self.stream.cuda_stream)
        except Exception as error:
            self.raise_if_in_trouble()
            raise RuntimeError(f"NCCL refused {operation}: {error}. With NCCL_DEBUG=WARN it says why.") from error
        collective = UnderWay(operation, self.stream.record_event(), time.monotonic())
        for tensor in tensors:
            tensor.record_stream(self.stream)
        if not torch.cuda.is_current_stream_capturing():  # what is captured does not run now, and cannot be asked
            self._under_way.append(collective)
        return NcclWork(self, collective)

    def raise_if_in_trouble(self) -> None:
        if self.trouble is not None:
            raise RuntimeError(self.trouble)

    def look(self) -> None:
        """Forget what is complete; give up if NCCL reports an error, or the oldest collective takes too long."""
        if self.trouble is not None:
            return
        try:
            while self._under_way and self._under_way[0].done.query():
                self._under_way.popleft()
            self._handle.check_async_error()
        except Exception as error:
            self.abort(f"NCCL reports {error}: as a rule, a rank has ended or cannot be reached any more")
            return
        if self._under_way and time.monotonic() - self._under_way[0].since > self._limit_s:
            stuck = self._under_way[0].operation
            self.abort(f"{stuck} was not complete after {self._limit_s:g} s: some rank has not made the same call")

    def abort(self, reason: str) -> None:
        """Give up: the kernels end, and whoever calls or waits from now on is told why."""
        self.trouble = (
            f"{reason}. The communicator has been aborted, and gradients since then are rubbish, as are weights "
            f"that were stepped with them: look for the first error in the other ranks' logs, and start again from "
            f"a checkpoint. NCCL_DEBUG=WARN tells more."
        )
        _log.error("%s", self.trouble)
        # A call that is stuck keeps the lock; the abort is what sets it free.
        is_ours = self._one_call_at_a_time.acquire(timeout=CALL_GRACE_S)
        try:
            with self._on_device():
                self._handle.abort()
        finally:
            if is_ours:
                self._one_call_at_a_time.release()


@dataclass(frozen=True)
class UnderWay:
    """A collective that has been enqueued, at `since`. Complete as soon as the device has passed `done`."""

    operation: str
    done: torch.cuda.Event
    since: float


class NcclWork:
    """What the caller holds of a collective."""

    def __init__(self, communicator: Communicator, collective: UnderWay):
        self._communicator = communicator
        self._operation = collective.operation
        self._done = collective.done

    def is_completed(self) -> bool:
        return self._done.query()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Let the current stream wait; the host only does with a `timeout`.

        Raises:
            RuntimeError: the communicator was given up, or the time has passed.
        """
        self._communicator.raise_if_in_trouble()
        torch.cuda.current_stream(self._communicator.device).wait_event(self._done)
        if timeout is not None:
            self._wait_on_host(timeout.total_seconds())

    def _wait_on_host(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self._done.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out after {limit_s:g} s of waiting for {self._operation}.")
            time.sleep(0.001)
        self._communicator.raise_if_in_trouble()

    def get_future(self) -> NcclWork:
        """As with torch's NCCL, a future that is done as soon as the collective has been enqueued: itself."""
        return self

    def add_done_callback(self, callback: Callable[[NcclWork], object]) -> None:
        """Call at once, with a stream current that the collective precedes."""
        with torch.cuda.stream(self._communicator.stream):
            callback(self)


def join(
    make_handle: Callable[[], Any], on_device: Callable[[], AbstractContextManager[Any]], limit_s: float
) -> Any:
    """What `make_handle` returns, as soon as all ranks have joined: it waits for the last of them, without limit.

    Raises:
        RuntimeError: that took longer than `limit_s` seconds, or NCCL refuses.
    """
    outcome: list[Any] = []

    def call() -> None:
        try:
            with on_device():
                outcome.append(make_handle())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call, name="minddp-nccl-join", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise RuntimeError(
            f"The ranks have met, but NCCL did not connect them within {limit_s:g} s. NCCL_DEBUG=INFO shows which "
            f"network it tries; NCCL_SOCKET_IFNAME names the right one."
        )
    if isinstance(outcome[0], Exception):
        raise RuntimeError(
            f"NCCL did not connect the ranks: {outcome[0]}. With NCCL_DEBUG=WARN it says why."
        ) from outcome[0]
    return outcome[0]


# ------------------------------------------------------------------ the thread


def _look_after(
    reference: weakref.ref[Communicator],
    stop: threading.Event,
    on_device: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Look now and then, with the device current: a thread without one sets up the host's first at any question."""
    with on_device():
        _let_others_capture()
        while not stop.wait(LOOK_EVERY_S):
            communicator = reference()
            if communicator is None:
                return
            communicator.look()
            del communicator


def _let_others_capture() -> None:
    """Have the questions of this thread not disturb a CUDA graph that another thread is capturing.

    By default a capture forbids all threads to ask events, and fails if one does. Where the library is not found
    the default stays; only captures are at risk then.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        _log.info("CUDA graphs may fail to be captured beside this transport: %s", error)


def _close(
    stop: threading.Event,
    handle: Any,
    on_device: Callable[[], AbstractContextManager[Any]],
    under_way: deque[UnderWay],
) -> None:
    """Leave in peace if all is done; else do not wait for ranks that may never come."""
    stop.set()
    with on_device():
        if all(collective.done.query() for collective in under_way):
            handle.destroy()
        else:
            handle.abort()
