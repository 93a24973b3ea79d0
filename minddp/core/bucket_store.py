"""The current plan, the buckets made for it, and the one rebuild. See [Note: two plans].

[Note: when buckets get their memory]
Buckets are allocated with the plan, as in torch, so that a model that is too large fails at construction. With
`lazy_bucket_allocation` the first buckets are made when the first backward needs them: until then, while the
optimizer is made and a checkpoint is loaded, the room is free. A rebuild releases the old memory before it asks
for the new.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.core.bucket import Allocate, GradientBucket, MakeBucket
from minddp.core.events import EventKind, EventStream
from minddp.core.packing import places_by_group
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_readiness, plan_from_registration
from minddp.transport.protocols import Transport


class BucketStore:
    """The plan and its buckets.

    Pack groups are numbered through all buckets; `groups[g]` is bucket and place, `members[g]` its
    parameters. They follow from the plan alone. `buckets` is empty until there is memory. `caps_before` and
    `caps_after` the rebuild are capacities in bytes. `rebuilds`: the first backward's order counts for all.
    """

    plan: BucketPlan

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
    ):
        self._params = params
        self._specs = specs
        self._caps_after = caps_after
        self._small_last_bucket = small_last_bucket
        self._make_bucket = make_bucket
        self._observed_order: list[int] | None = None
        self.rebuilds = rebuilds
        self.has_rebuilt = False
        self.buckets: list[GradientBucket] = []
        self._follow(plan_from_registration(specs, caps_before))

    def _follow(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.buckets = []
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
        self.move_grads_in()

    def make_buckets(self, allocate: Allocate) -> None:
        """Allocate the plan's buckets unless they exist."""
        if not self.buckets:
            self.buckets = [
                self._make_bucket(
                    spec,
                    [self._params[slot.param] for slot in spec.slots],
                    self.plan.names(spec.index),
                    allocate,
                )
                for spec in self.plan.buckets
            ]

    def begin_pass(self, allocate: Allocate) -> None:
        """A backward begins that is reduced."""
        self.make_buckets(allocate)
        for bucket in self.buckets:
            bucket.begin_pass()

    def move_grads_in(self) -> None:
        """Move gradients that exist into the buckets, where they are to be views.

        Not in a backward: how a gradient comes into its bucket decides how it is scaled there. See [Note: the mean
        is taken first].
        """
        for bucket in self.buckets:
            bucket.move_grads_in()

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
        events.emit(EventKind.BUCKETS_REBUILT, len(self.buckets))
        return True

    def await_another_order(self) -> None:
        """The ranks have changed: let the next backward show its order anew."""
        self.has_rebuilt, self._observed_order = False, None
