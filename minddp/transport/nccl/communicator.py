"""The NCCL communicator of one rank: a stream, the collectives enqueued on it, and a watchdog thread."""

from __future__ import annotations

import ctypes
import datetime
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

_log = logging.getLogger(__name__)
CHECK_EVERY_S = 0.5
CALL_GRACE_S = 5.0  # a call that takes longer is considered hung
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal

OnDevice = Callable[[], AbstractContextManager[Any]]


class Communicator:
    """Enqueues NCCL's calls on a stream of its own.

    `handle` is CuPy's `NcclCommunicator`; `on_device()` makes the device current for CuPy. A collective that is not
    complete after `limit_s` seconds is aborted.
    """

    def __init__(self, handle: Any, device: torch.device, on_device: OnDevice, limit_s: float):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.failure: str | None = None  # the reason of an abort
        self._handle = handle
        self._on_device = on_device
        self._limit_s = limit_s
        self._one_call_at_a_time = threading.Lock()  # forward and backward call in threads of their own
        self._in_flight: deque[InFlight] = deque()
        stop = threading.Event()
        threading.Thread(
            target=_check_regularly, args=(weakref.ref(self), stop, on_device), name="minddp-nccl", daemon=True
        ).start()
        weakref.finalize(self, _close, stop, handle, on_device, self._in_flight)

    def launch(self, method: str, source: torch.Tensor, target: torch.Tensor, *arguments: int) -> NcclWork:
        """Enqueue one collective, a method of `handle`. Returns at once."""
        operation = f"{method} of {source.numel():,} elements of {source.dtype}"
        self.raise_if_failed()
        ready = torch.cuda.current_stream(self.device).record_event()
        self.stream.wait_event(ready)
        enqueue, addresses = getattr(self._handle, method), (source.data_ptr(), target.data_ptr())
        try:
            with self._one_call_at_a_time, self._on_device():
                enqueue(*addresses, source.numel(), *arguments, self.stream.cuda_stream)
        except Exception as error:
            self.raise_if_failed()
            raise RuntimeError(f"NCCL refused {operation}: {error}. NCCL_DEBUG=WARN logs the reason.") from error
        collective = InFlight(operation, self.stream.record_event(), time.monotonic())
        for tensor in {source, target}:
            tensor.record_stream(self.stream)
        if not torch.cuda.is_current_stream_capturing():  # captured events cannot be queried
            self._in_flight.append(collective)
        return NcclWork(self, collective.done)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def check(self) -> None:
        """Remove completed collectives. Abort if NCCL reports an error or the oldest one exceeds the time limit."""
        if self.failure is not None:
            return
        try:
            while self._in_flight and self._in_flight[0].done.query():
                self._in_flight.popleft()
            self._handle.check_async_error()
        except Exception as error:
            self.abort(f"NCCL reports {error}: usually a rank has ended or cannot be reached any more")
            return
        if self._in_flight and time.monotonic() - self._in_flight[0].since > self._limit_s:
            stuck = self._in_flight[0].operation
            self.abort(f"{stuck} was not complete after {self._limit_s:g} s: some rank has not made the same call")

    def abort(self, reason: str) -> None:
        """End the kernels. Every later call and wait raises with the reason."""
        self.failure = (
            f"{reason}. The communicator has been aborted. Gradients since then are invalid, and so are weights "
            f"after a step with them. Look for the first error in the other ranks' logs, and start again from a "
            f"checkpoint. NCCL_DEBUG=WARN reports more."
        )
        _log.error("%s", self.failure)
        is_ours = self._one_call_at_a_time.acquire(timeout=CALL_GRACE_S)  # False if a call is stuck
        try:
            with self._on_device():
                self._handle.abort()
        finally:
            if is_ours:
                self._one_call_at_a_time.release()


class InFlight(NamedTuple):
    """A collective that was enqueued at the time `since`. Complete once the device has passed `done`."""

    operation: str
    done: torch.cuda.Event
    since: float


class NcclWork:
    """The handle of a collective."""

    def __init__(self, communicator: Communicator, done: torch.cuda.Event):
        self._communicator = communicator
        self._done = done
        self.is_completed = done.query

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Make the current stream wait. Raises a RuntimeError if the communicator was aborted."""
        assert timeout is None, "the device waits, not the host"
        self._communicator.raise_if_failed()
        torch.cuda.current_stream(self._communicator.device).wait_event(self._done)

    def call_when_done(self, call: Callable[[], object]) -> None:
        """At once, with a current stream that is behind the collective."""
        with torch.cuda.stream(self._communicator.stream):
            call()


def _check_regularly(reference: weakref.ref[Communicator], stop: threading.Event, on_device: OnDevice) -> None:
    """Runs with the device current. Otherwise, a thread's first query would initialise device 0."""
    with on_device():
        _allow_captures()
        while not stop.wait(CHECK_EVERY_S):
            communicator = reference()
            if communicator is None:
                return
            communicator.check()
            del communicator


def _allow_captures() -> None:
    """Let this thread query events while another one captures a CUDA graph; by default the capture would fail."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        _log.info("CUDA graphs may fail to be captured beside this transport: %s", error)


def _close(stop: threading.Event, handle: Any, on_device: OnDevice, in_flight: deque[InFlight]) -> None:
    """Destroy the communicator if all is complete. Otherwise abort it, which does not wait for other ranks."""
    stop.set()
    with on_device():
        if all(collective.done.query() for collective in in_flight):
            handle.destroy()
        else:
            handle.abort()
