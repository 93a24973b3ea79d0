"""The current plan, the buckets made for it, and the one rebuild. See [Note: two plans].

Buckets are made with the plan, as in torch, so that a model that is too large fails at construction. With
`lazy_bucket_allocation`, as in torch 2.15, each is made when the first of its gradients is ready, and all are
released when the backward has ended: the memory is free while activations take most of it, and between steps. A
gradient that is a view keeps its bucket's memory. A rebuild releases the old memory before it allocates the new.

Where a gradient lies in a bucket depends on its strides, and a script may change them (`.to(memory_format=...)`),
even on some ranks only. So all buckets have the strides of construction, when they are equal on all ranks, or those
that rank 0 sends with the order. Packing copies a gradient that has other strides element by element.

If gradients are views, a new bucket copies the existing gradients of its parameters into itself. They are then
resident and are divided, and later ones are multiplied: see [Note: the mean is taken first].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from minddp.core.bucket import Allocate, Bucket, MakeBucket, strides_of_gradient
from minddp.core.events import EventKind, EventStream
from minddp.core.packing import PackGroups
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_readiness, plan_from_registration
from minddp.platform import streams
from minddp.transport.protocols import Transport


class BucketStore:
    """The plan and its buckets.

    `caps_before` and `caps_after` the rebuild are in bytes. `rebuilds`: the order of the first backward is that of
    all later ones. `is_lazy`: buckets have memory in backward only.
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
        self.strides = list(map(strides_of_gradient, params))  # in buckets, for each parameter
        self.rebuilds = rebuilds
        self.has_rebuilt = False
        self.is_lazy = is_lazy
        self.made: dict[int, Bucket] = {}  # those that have memory, by index
        self._follow(plan_from_registration(specs, caps_before))

    def _follow(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.made = {}
        self.pack_groups = PackGroups.of(plan)

    def adopt(self, plan: BucketPlan, allocate: Allocate) -> None:
        """Release the buckets and make those of `plan`."""
        self._follow(plan)
        self.make_buckets(allocate)

    def make_buckets(self, allocate: Allocate) -> None:
        """Make the plan's buckets unless they exist. Lazy ones will use this `allocate`."""
        self._allocate = allocate
        if not self.is_lazy:
            self.all()

    def bucket(self, index: int) -> Bucket:
        """A bucket of the plan. Makes it if it does not exist."""
        if index not in self.made:
            params = [self._params[slot.param] for slot in self.plan.buckets[index].slots]
            strides = [self.strides[slot.param] for slot in self.plan.buckets[index].slots]
            names = self.plan.names(index)
            self.made[index] = self._make_bucket(self.plan.buckets[index], params, names, strides, self._allocate)
            self.made[index].move_grads_in()
        return self.made[index]

    def all(self) -> list[Bucket]:
        """The buckets in launch order. Makes those that do not exist."""
        return [self.bucket(index) for index in range(len(self.plan.buckets))]

    def release(self) -> None:
        """Drop the buckets; tensors may still refer to their memory. The next pass makes new ones."""
        for bucket in self.made.values():
            if not bucket.spec.sparse:
                streams.keep_for_current_stream(bucket.comm_buffer)  # backward may have allocated it on another one
        self.made = {}

    def begin_pass(self) -> None:
        """A synchronised backward begins."""
        buffers = [bucket.comm_buffer for bucket in self.made.values() if not bucket.spec.sparse]
        memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        for bucket in self.made.values():
            bucket.begin_pass(memory)

    def end_pass(self) -> None:
        """A backward has ended, or was dropped."""
        if self.is_lazy:
            self.release()

    # ------------------------------------------------------------------ the rebuild

    @property
    def will_rebuild(self) -> bool:
        """True if the next observed order of readiness leads to a rebuild."""
        return self.rebuilds and not self.has_rebuilt

    def observe(self, ready_order: list[int]) -> None:
        """Gradients became ready in this order: every parameter once."""
        self._observed_order = ready_order

    def rebuild_if_due(self, transport: Transport, events: EventStream) -> bool:
        """Rebuild once, in the order and with the strides of rank 0: the ranks' may differ. Collective."""
        observed, self._observed_order = self._observed_order, None
        if observed is None:
            return False
        order = self._follow_rank_0(transport, observed)
        self.has_rebuilt = True
        small_last = self._small_last_bucket
        plan = plan_from_readiness(self._specs, order, self._caps_after, small_last_bucket=small_last)
        self.adopt(plan, transport.allocate)
        events.emit(EventKind.BUCKETS_REBUILT, len(plan.buckets))
        return True

    def _follow_rank_0(self, transport: Transport, order: Sequence[int] = ()) -> list[int]:
        """Take over the strides of rank 0's gradients. Returns its `order`."""
        mine = [*order, *itertools.chain(*map(strides_of_gradient, self._params))]
        message = torch.tensor(mine, dtype=torch.int64, device=self._params[0].device)
        transport.broadcast(message, source=0).wait()
        numbers = iter(message.tolist())
        theirs = list(itertools.islice(numbers, len(order)))
        self.strides = [tuple(itertools.islice(numbers, param.dim())) for param in self._params]
        return theirs

    def await_another_order(self) -> None:
        """Forget the order: the next backward is observed again."""
        self.has_rebuilt, self._observed_order = False, None

    def keep_plan(self) -> None:
        """Do not rebuild any more."""
        self.rebuilds = False
        self.await_another_order()

    def restart(self, transport: Transport) -> None:
        """Go back to the first plan, if some ranks have rebuilt their buckets and others not. Collective."""
        self.await_another_order()
        self._follow_rank_0(transport)
        self.adopt(plan_from_registration(self._specs, self._caps_before), transport.allocate)
