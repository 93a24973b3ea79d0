"""Which buckets there are now: the plan, the memory made for it, and the one rebuild. See [Note: two plans].

[Note: when buckets get their memory]
With the plan, as torch does it, so that a model that is too large fails at construction. With
`lazy_bucket_allocation` the first buckets are made when the first backward needs them: until then, while the
optimizer is made and a checkpoint is loaded, the room is free. A rebuild lets go of the old memory before it asks
for the new.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.core.bucket import Allocate, Bucket, GradDtypes, allocate_buckets
from minddp.core.options import Options
from minddp.core.packing import slots_by_run
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_readiness, plan_from_registration
from minddp.modes.sparse import SparseBucket


class Bucketing:
    """The current plan and its buckets.

    `runs[r]` is a bucket and a run's place in it, `members[r]` the parameters in it, `runs_per_bucket[b]` how many
    a bucket has; they follow from the plan alone. `buckets` is empty until there is memory.
    """

    plan: BucketPlan

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        options: Options,
        *,
        grads_are_views: bool,
        dtypes: GradDtypes,
    ):
        self._params = params
        self._specs = specs
        self._caps = options.caps
        self._small_last_bucket = options.small_last_bucket
        self._grads_are_views = grads_are_views
        self._dtypes = dtypes
        self._observed_order: list[int] | None = None
        self.has_rebuilt = False
        self.buckets: list[Bucket | SparseBucket] = []
        self._follow(
            plan_from_registration(specs, self._caps.before_rebuild(order_is_final=not options.rebuilds_buckets))
        )

    def _follow(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.buckets = []
        by_run = [slots_by_run(spec) for spec in plan.buckets]
        self.runs = [(spec.index, run) for spec in plan.buckets for run in range(len(by_run[spec.index]))]
        self.members = [
            [spec.slots[place].param for place in places] for spec in plan.buckets for places in by_run[spec.index]
        ]
        self.runs_per_bucket = [len(runs) for runs in by_run]

    def adopt(self, plan: BucketPlan, allocate: Allocate) -> None:
        """Let go of the buckets and make those of `plan`, in memory got from `allocate`."""
        self._follow(plan)
        self.make_buckets(allocate)

    def make_buckets(self, allocate: Allocate, *, adopt_grads: bool = True) -> None:
        """Have memory for the plan. Does nothing if there is.

        `adopt_grads` moves gradients that exist into it, where they are to be views of it. Not in a backward: there
        a gradient is scaled by how it comes into its bucket, see [Note: the mean is taken first].
        """
        if self.buckets:
            return
        self.buckets = allocate_buckets(
            self.plan,
            self._params,
            grads_are_views=self._grads_are_views,
            adopt_grads=adopt_grads,
            dtypes=self._dtypes,
            allocate=allocate,
        )

    # ------------------------------------------------------------------ the rebuild

    def observe(self, ready_order: list[int]) -> None:
        """The order in which a backward has made the gradients ready: every parameter once."""
        self._observed_order = ready_order

    def take_observed_order(self) -> list[int] | None:
        """The order by which to rebuild, once."""
        order, self._observed_order = self._observed_order, None
        return order

    def rebuild(self, ready_order: Sequence[int], allocate: Allocate) -> None:
        self.has_rebuilt = True
        self.adopt(
            plan_from_readiness(
                self._specs, ready_order, self._caps.after_rebuild(), small_last_bucket=self._small_last_bucket
            ),
            allocate,
        )

    def await_another_order(self) -> None:
        """The ranks have changed: let the next backward show its order anew."""
        self.has_rebuilt, self._observed_order = False, None
