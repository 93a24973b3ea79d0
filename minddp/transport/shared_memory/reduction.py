"""One all-reduce that is under way on this rank, as the one sees it who waits for it."""

from __future__ import annotations

import datetime
import threading
import time

import torch

GRACE_S = 10.0  # for the worker to notice that a time limit has passed, or that it is to end


class Reduction:
    """One all-reduce on this rank. `tensor` is this rank's addend, flat, and in the end the sum."""

    def __init__(self, number: int, tensor: torch.Tensor, deadline: float):
        self.number = number
        self.tensor = tensor
        self.deadline = deadline
        self._error: str | None = None
        self._landed = threading.Event()

    def land(self, error: str | None = None) -> None:
        self._error = error
        self._landed.set()

    def is_completed(self) -> bool:
        return self._landed.is_set()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Return once the sum is there. One that has timed out goes on, and can be waited for again.

        Raises:
            RuntimeError: a peer is gone, or has made another call, or a time limit has passed.
        """
        limit_s = max(self.deadline - time.monotonic(), 0) + GRACE_S
        if timeout is not None:
            limit_s = min(limit_s, timeout.total_seconds())
        if not self._landed.wait(limit_s):
            raise RuntimeError(f"Timed out after {limit_s:g} s of waiting for all-reduce {self.number}.")
        if self._error is not None:
            raise RuntimeError(self._error)
