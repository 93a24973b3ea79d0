"""The parts of a reducer, chosen by the constructor's options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from minddp.core.autograd import GradientHooks
from minddp.core.bucket import Allocate, Bucket, GradDtypes, GradientBucket, MakeBucket
from minddp.core.bucket_store import BucketStore
from minddp.core.find_unused import FindUnused
from minddp.core.gradient_aliasing import GradientAliasing
from minddp.core.packing import Scaling
from minddp.core.plan import BucketSpec, ParamSpec
from minddp.core.reducer import Reducer
from minddp.core.reduction import AllReduceStrategy, DivisorOfBackward, ReduceStrategy
from minddp.core.static_graph import StaticGraph
from minddp.core.unfinished import UnfinishedReduction
from minddp.core.usage_tracker import UsageTracker
from minddp.modes.mixed_precision import MixedPrecision
from minddp.modes.rpc import RpcGradients
from minddp.modes.sparse import SparseBucket
from minddp.options import Options
from minddp.platform.acceleration_switch import acceleration_is_on
from minddp.replicas.agreement import serial_number
from minddp.transport.protocols import Transport


@dataclass(frozen=True)
class Strategies:
    """Makes the parts of a reducer. Parameters in `sparse_names` have sparse gradients."""

    options: Options
    named_params: Sequence[tuple[str, nn.Parameter]]
    sparse_names: Collection[str]
    divisor: DivisorOfBackward
    mixed_precision: MixedPrecision | None = None

    def reducer(self, transport: Transport) -> Reducer:
        names, params = [name for name, _ in self.named_params], [param for _, param in self.named_params]
        aliasing = GradientAliasing(params) if self._may_alias else None
        specs = [
            ParamSpec(n, p.numel(), p.dtype, p.device, sparse=n in self.sparse_names) for n, p in self.named_params
        ]
        store = BucketStore(
            params,
            specs,
            self._bucket_maker(aliasing),
            self.options.caps.before_rebuild(order_is_final=not self.options.rebuilds_buckets),
            self.options.caps.after_rebuild(),
            rebuilds=self.options.rebuilds_buckets,
            small_last_bucket=self.options.small_last_bucket,
            is_lazy=self.options.lazy_bucket_allocation,
        )
        store.make_buckets(transport.allocate)
        hooks = GradientHooks(params, names=names)
        return Reducer(
            hooks,
            transport,
            store,
            self.usage_tracker(hooks),
            self.all_reduce(transport),
            UnfinishedReduction(params, names, serial_number(names, transport)),
            [RpcGradients(params, names), *filter(None, (aliasing, self.mixed_precision))],
        )

    @property
    def _grads_are_views(self) -> bool:
        return self.options.gradient_as_bucket_view and self.mixed_precision is None

    @property
    def _may_alias(self) -> bool:
        """See [Note: gradient aliasing]."""
        copies = not self._grads_are_views and self.mixed_precision is None
        return acceleration_is_on() and copies and not self.options.finds_unused_each_pass

    def _bucket_maker(self, aliasing: GradientAliasing | None) -> MakeBucket:
        """Makes dense or sparse buckets, with their dtypes, and the way that averages take into `.grad`."""
        dtypes = self.mixed_precision.grad_dtypes if self.mixed_precision else GradDtypes()
        make_aliasing = aliasing.of_bucket if aliasing else None
        dense = partial(Bucket, grads_are_views=self._grads_are_views, dtypes=dtypes, make_aliasing=make_aliasing)

        def make_bucket(
            spec: BucketSpec, params: list[nn.Parameter], names: list[str], allocate: Allocate
        ) -> GradientBucket:
            return SparseBucket(spec, params, names) if spec.sparse else dense(spec, params, names, allocate)

        return make_bucket

    def usage_tracker(self, hooks: GradientHooks) -> UsageTracker:
        """How it is known which gradients a backward brings."""
        options, params = self.options, hooks.params
        skips_buckets = options.skip_all_reduce_unused_params
        if options.static_graph and params:
            return StaticGraph(params, finds_unused=options.find_unused_parameters, skips_buckets=skips_buckets)
        if options.find_unused_parameters and params:
            return FindUnused(params, hooks, skips_buckets=skips_buckets)
        return UsageTracker(params)

    def all_reduce(self, transport: Transport) -> ReduceStrategy:
        """The strategy without a communication hook. Native mixed precision divides the sum."""
        scaling = Scaling(divide_resident=self._grads_are_views, divide_all=self.options.batched_grad_copy)
        return AllReduceStrategy(transport, self.divisor, scaling, divides_after=self.mixed_precision is not None)
