"""The bucket plan: the bucket and offset of each gradient, and the order in which buckets are reduced.

Pure arithmetic on sizes, dtypes and devices. It needs no tensors and no processes, so a plan can be made, printed
and tested without them.

[Note: two plans]
A bucket should hold gradients that become ready one after the other. Before the first backward the best guess of
that order is the reverse of the registration order; `plan_from_registration` uses it. The first backward shows the
true order; `plan_from_readiness` uses it, once, for the rest of the training. Torch does the same, and the layout
decides bits: a ring all-reduce adds the ranks in an order that depends on an element's offset in the buffer, so
with three or more ranks two layouts give two sums.

[Note: launch order]
Buckets are launched in plan order, never in the order in which they fill. Collectives are matched by call
order: the n-th all-reduce of one rank with the n-th of every other rank. Ranks may fill buckets in different
orders (another branch, another thread schedule), and if they launched in order of readiness they would add
unrelated numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from minddp.platform.wording import count, table


@dataclass(frozen=True)
class ParamSpec:
    """The properties of a parameter that the plan depends on. `sparse`: its gradient is a sparse tensor."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's gradient: `numel` elements from `offset` (in elements) in bucket `bucket`."""

    param: int
    bucket: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketSpec:
    """One flat buffer: gradients of one dtype on one device, contiguous; a gradient is never split across buckets.

    A sparse gradient has a bucket of its own: its size is known only when it arrives.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    cap_bytes: int
    sparse: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """All buckets in launch order: bucket 0 is the first to be all-reduced in every backward."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[BucketSpec, ...]
    origin: str

    @cached_property
    def slot_of(self) -> tuple[Slot, ...]:
        """Parameter index -> its slot."""
        slots = (slot for bucket in self.buckets for slot in bucket.slots)
        return tuple(sorted(slots, key=lambda slot: slot.param))

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def names(self, bucket: int) -> list[str]:
        """Names of the parameters in a bucket, in the order of their offsets."""
        return [self.params[slot.param].name for slot in self.buckets[bucket].slots]

    def __str__(self) -> str:
        rows: list[Sequence[str]] = [("launch", "parameter", "dtype", "device", "offset", "elements", "bytes")]
        for bucket in self.buckets:
            dtype = str(bucket.dtype).removeprefix("torch.") + (", sparse" if bucket.sparse else "")
            for slot in bucket.slots:
                spec = self.params[slot.param]
                launch = str(bucket.index) if slot.offset == 0 and slot is bucket.slots[0] else ""
                sizes = [f"{size:,}" for size in (slot.offset, slot.numel, spec.nbytes)]
                rows.append((launch, spec.name, dtype, str(bucket.device), *sizes))
        title = (
            f"bucket plan by {self.origin}: {count(len(self.params), 'parameter')}, "
            f"{count(len(self.buckets), 'bucket')}, {self.nbytes:,} bytes"
        )
        return title + "\n" + table(rows, align="><<<>>>")


def plan_from_registration(specs: Sequence[ParamSpec], caps_bytes: Sequence[int]) -> BucketPlan:
    """The first plan: fill buckets in registration order, launch them in reverse.

    Within a bucket the offsets follow registration order, as in torch.
    """
    groups = _fill(specs, range(len(specs)), caps_bytes)
    groups.sort(key=lambda group: min(group.params))
    return _plan(specs, reversed(groups), origin="registration order, reversed")


def plan_from_readiness(
    specs: Sequence[ParamSpec],
    ready_order: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    small_last_bucket: bool = False,
) -> BucketPlan:
    """The plan after a backward has shown the order of readiness.

    `ready_order` holds every parameter index once. Buckets are filled in that order and launched in the order in
    which they become full. With `small_last_bucket` (torch's DDP_SET_LAST_BUCKET_CAP=1) capacities count from the
    end, so that the small one is launched last: nothing hides its communication.

    Raises:
        ValueError: `ready_order` is not a permutation of the parameters.
    """
    if sorted(ready_order) != list(range(len(specs))):
        raise ValueError(
            f"The ready order must hold each of {len(specs)} parameters once, got {list(ready_order)}."
        )
    position = {param: place for place, param in enumerate(ready_order)}
    groups = _fill(specs, reversed(ready_order) if small_last_bucket else ready_order, caps_bytes)
    groups.sort(key=lambda group: max(position[param] for param in group.params))
    return _plan(specs, groups, origin="order of readiness")


def plan_from_groups(specs: Sequence[ParamSpec], groups: Sequence[Sequence[int]], origin: str) -> BucketPlan:
    """A plan with given buckets: `groups` hold every parameter index once, in launch order."""
    sized = [_Group(list(group), cap_bytes=sum(specs[param].nbytes for param in group)) for group in groups]
    return _plan(specs, sized, origin)


@dataclass
class _Group:
    """A bucket that is being filled."""

    params: list[int]
    cap_bytes: int
    nbytes: int = 0


def _fill(specs: Sequence[ParamSpec], order: Iterable[int], caps_bytes: Sequence[int]) -> list[_Group]:
    """Distribute parameters over buckets: one open bucket per dtype and device, which closes at its capacity."""
    open_groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
    closed: list[_Group] = []
    closed_of_kind: dict[tuple[torch.dtype, torch.device], int] = {}
    for param in order:
        spec = specs[param]
        if spec.sparse:
            closed.append(_Group([param], cap_bytes=0, nbytes=spec.nbytes))
            continue
        kind = (spec.dtype, spec.device)
        if kind not in open_groups:
            turn = min(closed_of_kind.get(kind, 0), len(caps_bytes) - 1)
            open_groups[kind] = _Group([], caps_bytes[turn])
        group = open_groups[kind]
        group.params.append(param)
        group.nbytes += spec.nbytes
        if group.nbytes >= group.cap_bytes:
            closed.append(open_groups.pop(kind))
            closed_of_kind[kind] = closed_of_kind.get(kind, 0) + 1
    return closed + list(open_groups.values())


def _plan(specs: Sequence[ParamSpec], groups: Iterable[_Group], origin: str) -> BucketPlan:
    buckets = []
    for index, group in enumerate(groups):
        slots, offset = [], 0
        for param in group.params:
            slots.append(Slot(param, index, offset, specs[param].numel))
            offset += specs[param].numel
        first = specs[group.params[0]]
        buckets.append(BucketSpec(index, first.dtype, first.device, tuple(slots), group.cap_bytes, first.sparse))
    return BucketPlan(tuple(specs), tuple(buckets), origin)
