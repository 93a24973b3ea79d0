"""Arithmetic on what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """The model of a message's time: `latency_s + nbytes / bytes_per_s` (Hockney 1994)."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


def fit_line(seconds_of_bytes: Mapping[int, float]) -> Line:
    """The line closest to the times of two or more sizes, where errors count in proportion to the time itself.

    Otherwise the largest message alone would decide, and the latency would be what its noise leaves over.
    """
    nbytes = np.array(list(seconds_of_bytes), dtype=float)
    seconds = np.array(list(seconds_of_bytes.values()))
    rows = np.stack([np.ones_like(nbytes), nbytes], axis=1) / seconds[:, None]
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    if latency_s < 0:  # then the best line among those through the origin
        through = nbytes / seconds
        latency_s, s_per_byte = 0.0, through.sum() / (through**2).sum()
    return Line(float(latency_s), float(1 / max(s_per_byte, 1e-15)))


class Reading(NamedTuple):
    """A clock, read before and after an event that all ranks took part in, in seconds."""

    before_s: float
    after_s: float


class Offset(NamedTuple):
    """How far one clock is ahead of another: `seconds`, give or take `error_s`."""

    seconds: float
    error_s: float


def clock_offset(ours: Sequence[Reading], theirs: Sequence[Reading]) -> Offset:
    """How far our clock is ahead of theirs, given readings of both around the same barriers.

    No rank leaves a barrier before all have entered it. At the moment when the last one enters, each clock is
    between its two readings, so the difference is between `ours.before - theirs.after` and `ours.after -
    theirs.before`. What all barriers allow is left.
    """
    low = max(our.before_s - their.after_s for our, their in zip(ours, theirs, strict=True))
    high = min(our.after_s - their.before_s for our, their in zip(ours, theirs, strict=True))
    return Offset((low + high) / 2, abs(high - low) / 2)
