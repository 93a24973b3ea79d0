"""The current plan, the buckets made for it, and the one rebuild. See [Note: two plans].

[Note: when buckets get their memory]
Buckets are made with the plan, as in torch, so that a model that is too large fails at construction. With
`lazy_bucket_allocation`, as in torch 2.15, each is made when the first of its gradients is ready, and all are
released when the backward has ended: the room is free while activations take most of it, and between steps. A
gradient that is a view keeps its bucket's memory. A rebuild releases the old memory before it asks for the new.

Where gradients are to be views, a new bucket takes in those that its parameters have at that moment, so these are
divided and later ones multiplied: see [Note: the mean is taken first].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.core.bucket import Allocate, GradientBucket, MakeBucket
from minddp.core.events import EventKind, EventStream
from minddp.core.packing import places_by_group
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_readiness, plan_from_registration
from minddp.platform import streams
from minddp.transport.protocols import Transport


class BucketStore:
    """The plan and its buckets.

    Pack groups, which follow from the plan, are numbered through all buckets; `groups[g]` is bucket and place,
    `members[g]` its parameters. `made` are the buckets that have memory, by index; if `is_lazy`, in backward only.
    `caps_before` and `caps_after` the rebuild are in bytes. `rebuilds`: the first backward's order counts for all.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        make_bucket: MakeBucket,
        caps_before: Sequence[int],
        caps_after: Sequence[int],
        *,
        rebuilds: bool = True,
        small_last_bucket: bool = False,
        is_lazy: bool = False,
    ):
        self._params = params
        self._specs = specs
        self._caps_before = caps_before
        self._caps_after = caps_after
        self._small_last_bucket = small_last_bucket
        self._make_bucket = make_bucket
        self._observed_order: list[int] | None = None
        self.rebuilds = rebuilds
        self.has_rebuilt = False
        self.is_lazy = is_lazy
        self.made: dict[int, GradientBucket] = {}
        self._follow(plan_from_registration(specs, caps_before))

    def _follow(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.made = {}
        by_group = [places_by_group(spec) for spec in plan.buckets]
        self.groups = [(bucket, group) for bucket, places in enumerate(by_group) for group in range(len(places))]
        self.members = [
            [spec.slots[place].param for place in places]
            for spec in plan.buckets
            for places in by_group[spec.index]
        ]
        self.groups_per_bucket = [len(places) for places in by_group]
        self.group_of = [0] * len(self._params)
        for group, params in enumerate(self.members):
            for param in params:
                self.group_of[param] = group

    def adopt(self, plan: BucketPlan, allocate: Allocate) -> None:
        """Release the buckets and make those of `plan`."""
        self._follow(plan)
        self.make_buckets(allocate)

    def make_buckets(self, allocate: Allocate) -> None:
        """Make the plan's buckets unless they exist. Lazy ones will be made by this `allocate`."""
        self._allocate = allocate
        if not self.is_lazy:
            self.all()

    def bucket(self, index: int) -> GradientBucket:
        """A bucket of the plan, which is made if need be."""
        if index not in self.made:
            params = [self._params[slot.param] for slot in self.plan.buckets[index].slots]
            names = self.plan.names(index)
            self.made[index] = self._make_bucket(self.plan.buckets[index], params, names, self._allocate)
            self.made[index].move_grads_in()
        return self.made[index]

    def all(self) -> list[GradientBucket]:
        """The buckets in launch order. Those that do not exist are made."""
        return [self.bucket(index) for index in range(len(self.plan.buckets))]

    def release(self) -> None:
        """Leave the buckets' memory to whatever still refers to it. The next pass makes other ones."""
        for bucket in self.made.values():
            if not bucket.spec.sparse:
                streams.keep_for_current_stream(bucket.wire)  # backward may have allocated it on another one
        self.made = {}

    def begin_pass(self) -> None:
        """A backward begins that is reduced."""
        for bucket in self.made.values():
            bucket.begin_pass()

    def end_pass(self) -> None:
        """A backward has ended, or is dropped."""
        if self.is_lazy:
            self.release()

    # ------------------------------------------------------------------ the rebuild

    @property
    def awaits_order(self) -> bool:
        """True if the next order of readiness that is observed leads to a rebuild."""
        return self.rebuilds and not self.has_rebuilt

    def observe(self, ready_order: list[int]) -> None:
        """A backward has made the gradients ready in this order: every parameter once."""
        self._observed_order = ready_order

    def rebuild_if_due(self, transport: Transport, events: EventStream) -> bool:
        """Rebuild once, by the order that rank 0 has observed: ranks may have seen different ones. Collective."""
        observed, self._observed_order = self._observed_order, None
        if observed is None:
            return False
        events.emit(EventKind.REBUILD_BEGIN)
        order = torch.tensor(observed, dtype=torch.int64, device=self._params[0].device)
        transport.broadcast(order, source=0).wait()
        self.has_rebuilt = True
        small_last = self._small_last_bucket
        plan = plan_from_readiness(self._specs, order.tolist(), self._caps_after, small_last_bucket=small_last)
        self.adopt(plan, transport.allocate)
        events.emit(EventKind.BUCKETS_REBUILT, len(plan.buckets))
        return True

    def await_another_order(self) -> None:
        """The ranks have changed: let the next backward show its order anew."""
        self.has_rebuilt, self._observed_order = False, None

    def keep_plan(self) -> None:
        """Do not rebuild any more."""
        self.rebuilds = False
        self.await_another_order()  # and forget the one that it may have observed

    def begin_anew(self, allocate: Allocate) -> None:
        """Go back to the plan that construction gives: so one rank may have rebuilt, and another one not."""
        self.await_another_order()
        self.adopt(plan_from_registration(self._specs, self._caps_before), allocate)
