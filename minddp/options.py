"""The constructor's options: checked once, then frozen.

Wrong options, and options that exclude each other, raise before a process group is used. No option is ignored.
"""

from __future__ import annotations

import numbers
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch.distributed as dist

MIB = 1024 * 1024
UNBOUNDED = 1 << 62  # a bucket capacity that no model reaches, in bytes


@dataclass(frozen=True)
class BucketCaps:
    """How large buckets may grow, in bytes. A bucket closes once it *reaches* its capacity.

    `first_bytes` applies to the first bucket of each dtype and device, `rest_bytes` to the others. With
    `each_bytes` (from `bucket_cap_mb_list`) every bucket has a capacity of its own, the last one repeating.
    """

    first_bytes: int
    rest_bytes: int
    each_bytes: tuple[int, ...] = ()

    @classmethod
    def from_mib(
        cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None, first_cap_mb: float | None = None
    ) -> BucketCaps:
        """Torch's rule: a first bucket of 1 MiB if no capacity is given. Or minddp's `first_cap_mb`."""
        if cap_mb_list:
            each = tuple(int(mb * MIB) for mb in cap_mb_list)
            return cls(max(each), max(each), each)
        if first_cap_mb is None:
            default_mb = getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", MIB) / MIB
            first_cap_mb = default_mb if cap_mb is None else cap_mb
        return cls(int(first_cap_mb * MIB), int((25 if cap_mb is None else cap_mb) * MIB))

    def before_rebuild(self, *, order_is_final: bool) -> tuple[int, ...]:
        """Capacities for the plan made at construction. See [Note: two plans]."""
        if self.each_bytes or order_is_final:
            return self.after_rebuild()
        return (UNBOUNDED,)  # the order is only a guess, so the first backward has a single bucket

    def after_rebuild(self) -> tuple[int, ...]:
        """Capacities for the plan made from the observed order."""
        return self.each_bytes or (self.first_bytes, self.rest_bytes)


@dataclass(frozen=True)
class Options:
    """The constructor's options, after all checks."""

    caps: BucketCaps
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    init_sync: bool
    init_sync_buffers: bool
    forward_sync_buffers: bool
    small_last_bucket: bool
    lazy_bucket_allocation: bool = False
    has_mixed_precision: bool = False

    @property
    def grads_are_views(self) -> bool:
        """With mixed precision `.grad` has another dtype than the buckets."""
        return self.gradient_as_bucket_view and not self.has_mixed_precision

    @property
    def rebuilds_buckets(self) -> bool:
        """True if the buckets are rebuilt in the order of the first backward."""
        return not self.finds_unused_each_pass

    @property
    def finds_unused_each_pass(self) -> bool:
        return self.find_unused_parameters and not self.static_graph

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> Options:
        """Options from the constructor's arguments, by name; others may be among them.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: a capacity is negative or not finite, or two arguments exclude each other.
        """
        broadcast, forward = arguments["broadcast_buffers"], arguments["forward_sync_buffers"]
        cap, cap_list = arguments["bucket_cap_mb"], arguments["bucket_cap_mb_list"]
        first_cap = arguments["first_bucket_cap_mb"]
        flags = [field.name for field in fields(cls) if field.name in arguments]
        for name in (*flags, "broadcast_buffers"):
            check_flag(name, arguments[name])
        _check_caps(cap, cap_list, first_cap)
        _warn_of_deprecated(broadcast, forward, arguments.get("check_reduction", False))
        # The deprecated broadcast_buffers=False also leaves the buffers out of the broadcast at construction;
        # its replacement, forward_sync_buffers=False, does not (torch 2.13).
        legacy = True if broadcast is None else bool(broadcast)
        chosen = {name: bool(arguments[name]) for name in flags}
        if forward is None:
            chosen["forward_sync_buffers"] = legacy
        return cls(
            caps=BucketCaps.from_mib(cap, cap_list, first_cap),
            init_sync_buffers=True if forward is not None else legacy,
            has_mixed_precision=arguments["mixed_precision"] is not None,
            small_last_bucket=os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1",
            **chosen,
        )


def exclude(option: str, others: Mapping[str, bool], why: str = "leave one of them out") -> None:
    """Raise a `ValueError` if one of `others` is true."""
    for name, is_set in others.items():
        if is_set:
            raise ValueError(f"{option} and {name} exclude each other: {why}.")


def _warn_of_deprecated(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, check_reduction: bool
) -> None:
    """The warnings point to the line that calls the constructor."""
    level = 2
    while sys._getframe(level - 1).f_globals.get("__name__", "").startswith("minddp."):
        level += 1
    if broadcast_buffers is not None:
        rest = "use `forward_sync_buffers`, which unlike it keeps the broadcast of buffers at construction."
        if forward_sync_buffers is not None:
            rest = "its value is ignored, since `forward_sync_buffers` is given too."
        warnings.warn(f"`broadcast_buffers` is deprecated: {rest}", FutureWarning, stacklevel=level)
    if check_reduction:
        warnings.warn("`check_reduction` is deprecated and has no effect.", FutureWarning, stacklevel=level)


def check_flag(name: str, value: object) -> None:
    # Scripts pass 0 and 1, None and numpy's bools. Strings and containers are mistakes: "False" would be true.
    if not (value is None or isinstance(value, (bool, numbers.Number, np.bool_))):
        raise TypeError(f"`{name}` must be True or False, but is {value!r} ({type(value).__name__}).")


def _check_caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None, first_cap_mb: float | None) -> None:
    if cap_mb_list is not None and not isinstance(cap_mb_list, Iterable):
        raise TypeError(f"`bucket_cap_mb_list` takes mebibytes as a list of numbers, but got {cap_mb_list!r}.")
    single = {"bucket_cap_mb": cap_mb, "first_bucket_cap_mb": first_cap_mb}
    if cap_mb_list:
        listed = f"`bucket_cap_mb_list` ({list(cap_mb_list)})"
        for name, cap in single.items():
            exclude(f"`{name}` ({cap})", {listed: cap is not None}, "the list has a capacity for each bucket")
    given = [("bucket_cap_mb_list", cap) for cap in cap_mb_list or ()]
    for name, cap in [*given, *((name, cap) for name, cap in single.items() if cap is not None)]:
        if isinstance(cap, bool) or not isinstance(cap, numbers.Real):
            raise TypeError(f"`{name}` takes mebibytes as numbers, but got {cap!r} ({type(cap).__name__}).")
        if not 0 <= cap < UNBOUNDED / MIB:
            raise ValueError(f"`{name}` takes a finite number of mebibytes, 0 or more, but got {cap!r}.")
