"""Arithmetic on what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_ITERATIONS = 50


class Line(NamedTuple):
    """The model of a message's time: `latency_s + nbytes / bytes_per_s` (Hockney 1994)."""

    latency_s: float
    bytes_per_s: float


def fit_line(seconds_of_bytes: Mapping[int, float]) -> Line:
    """The line closest to the times of two or more sizes, where closeness is a matter of ratios.

    Sizes span four orders of magnitude. In plain least squares the largest message alone would decide, and the
    latency would be what its noise leaves over. So this minimises the squares of log(fitted / measured), over the
    logarithms of both parameters, which keeps them positive: Gauss-Newton, from the line through the ends.
    """
    nbytes = np.array(list(seconds_of_bytes), dtype=float)
    seconds = np.array(list(seconds_of_bytes.values()))
    terms = np.stack([np.ones_like(nbytes), nbytes], axis=1)
    parameters = np.array([seconds[nbytes.argmin()], seconds[nbytes.argmax()] / nbytes.max()])
    for _ in range(_ITERATIONS):
        fitted = terms @ parameters
        slopes = terms * parameters / fitted[:, None]
        step, *_ = np.linalg.lstsq(slopes, np.log(seconds / fitted), rcond=None)
        parameters *= np.exp(np.clip(step, -1.0, 1.0))
    latency_s, s_per_byte = parameters
    return Line(float(latency_s), float(1 / s_per_byte))


class CoreTime(NamedTuple):
    """For how long a thread has had a core so far, and for how long it was ready to run and had none."""

    had_s: float
    denied_s: float


def share_denied(before: CoreTime, after: CoreTime) -> float:
    """Of the time between two readings in which a thread wanted a core, the part in which it had none."""
    had_s, denied_s = after.had_s - before.had_s, after.denied_s - before.denied_s
    return denied_s / (had_s + denied_s) if denied_s else 0.0


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
