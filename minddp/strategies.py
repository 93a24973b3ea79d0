"""The parts of a reducer, chosen by the constructor's options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch import nn

from minddp.core.autograd import GradientHooks
from minddp.core.bucket import Allocate, Bucket, MakeBucket
from minddp.core.bucket_store import BucketStore
from minddp.core.find_unused import FindUnused
from minddp.core.gradient_aliasing import BucketAliasing, GradientAliasing
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


def make_reducer(
    options: Options,
    named_params: Sequence[tuple[str, nn.Parameter]],
    sparse_names: Collection[str],
    transport: Transport,
    divisor: DivisorOfBackward,
    mixed_precision: MixedPrecision | None = None,
) -> Reducer:
    """The reducer of these parameters. Those in `sparse_names` have sparse gradients."""
    names, params = [name for name, _ in named_params], [param for _, param in named_params]
    # See [Note: gradient aliasing].
    copies = not options.grads_are_views and mixed_precision is None and not options.finds_unused_each_pass
    aliasing = GradientAliasing(params) if acceleration_is_on() and copies else None
    specs = [ParamSpec(n, p.numel(), p.dtype, p.device, sparse=n in sparse_names) for n, p in named_params]
    store = BucketStore(
        params,
        specs,
        _bucket_maker(options, aliasing, mixed_precision),
        options.caps.before_rebuild(order_is_final=not options.rebuilds_buckets),
        options.caps.after_rebuild(),
        rebuilds=options.rebuilds_buckets,
        small_last_bucket=options.small_last_bucket,
        is_lazy=options.lazy_bucket_allocation,
    )
    store.make_buckets(transport.allocate)
    hooks = GradientHooks(params, names=names)
    return Reducer(
        hooks,
        transport,
        store,
        usage_tracker(options, hooks),
        all_reduce(options, transport, divisor),
        UnfinishedReduction(params, names, serial_number(names, transport)),
        [RpcGradients(params, names), *filter(None, (aliasing, mixed_precision))],
    )


def _bucket_maker(
    options: Options, aliasing: GradientAliasing | None, mixed_precision: MixedPrecision | None
) -> MakeBucket:
    """A factory for buckets: dense or sparse, in the right dtypes, with or without gradient aliasing."""
    dense = partial(
        Bucket,
        grads_are_views=options.grads_are_views,
        grad_dtype=mixed_precision.param_dtype if mixed_precision else None,
        reduce_dtype=mixed_precision.reduce_dtype if mixed_precision else None,
        make_aliasing=partial(BucketAliasing, aliasing) if aliasing else None,
    )

    def make_bucket(
        spec: BucketSpec,
        params: list[nn.Parameter],
        names: list[str],
        strides: list[tuple[int, ...]],
        allocate: Allocate,
    ) -> Bucket:
        make: MakeBucket = SparseBucket if spec.sparse else dense
        return make(spec, params, names, strides, allocate)

    return make_bucket


def usage_tracker(options: Options, hooks: GradientHooks) -> UsageTracker:
    """The usage tracker for these options."""
    params, skips_buckets = hooks.params, options.skip_all_reduce_unused_params
    if options.static_graph and params:
        return StaticGraph(params, skips_buckets=skips_buckets)
    if options.find_unused_parameters and params:
        return FindUnused(params, hooks, skips_buckets=skips_buckets)
    return UsageTracker(params)


def all_reduce(options: Options, transport: Transport, divisor: DivisorOfBackward) -> ReduceStrategy:
    """The strategy without a communication hook. Native mixed precision divides the sum."""
    scaling = Scaling(divide_resident=options.grads_are_views, divide_all=options.batched_grad_copy)
    return AllReduceStrategy(transport, divisor, scaling, divides_after=options.has_mixed_precision)
