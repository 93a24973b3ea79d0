"""The class that `import minddp` exports: the wrapper, and an extension for each argument that requests a tool.

| argument | extension | the tool |
|---|---|---|
| `stuck_after_s` | `WatchedWaits` | `tools/watchdog/watched_transport.py` |
| `on_drift` | `Guarded` | `tools/watchdog/guard.py` |
| `check_finite` | `FiniteGradients` | `tools/watchdog/finite.py` |
| `logical_ranks` | `Shares` | `tools/elastic/logical_ranks.py` |
| `bucket_cap_mb="auto"` | `TunedBuckets` | `tools/forecast/auto_buckets.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from minddp import ddp as core
from minddp.compat import surface
from minddp.extension import Extension
from minddp.modes.optimizer_overlap import OverlappedOptimizer
from minddp.options import check_flag, exclude
from minddp.platform.streams import has_streams
from minddp.replicas.placement import sparse_parameters
from minddp.tools.elastic.logical_ranks import LogicalRanks, TreeReduceStrategy
from minddp.tools.forecast import AutoBuckets, clock_of
from minddp.tools.forecast.auto_buckets import Tuning
from minddp.tools.watchdog import RankState, state_of, watched
from minddp.tools.watchdog.drift import checks_of_drift
from minddp.tools.watchdog.finite import CheckFinite
from minddp.tools.watchdog.guard import Guard
from minddp.tools.watchdog.slow_rank import SlowRank
from minddp.transport.protocols import Transport

ON_DRIFT = ("warn", "raise", None)
AUTO = "auto"
REQUESTS = ("stuck_after_s", "on_drift", "logical_ranks", "check_finite")  # arguments of tools


@dataclass(eq=False)
class WatchedWaits(Extension):
    """Diagnoses waits for other ranks that take longer than `limit_s`."""

    limit_s: float

    def wrap_transport(self, transport: Transport, ddp: core.DistributedDataParallel) -> Transport:
        return watched(transport, self.limit_s, MethodType(_rank_state, ddp))


def _rank_state(ddp: core.DistributedDataParallel) -> RankState:
    """Called from another thread, possibly during construction."""
    if not hasattr(ddp, "_reducer"):
        return RankState()
    return state_of(ddp._reducer, accumulates=not ddp.require_backward_grad_sync)


@dataclass(eq=False)
class Guarded(Extension):
    """Attaches a guard if there are other ranks, and a store to exchange notes with them.

    With `shares` ranks have different numbers of forwards, and the guard looks only at synchronised ones.
    """

    raises: bool
    shares: bool
    guard: Guard | None = field(default=None, init=False)

    def attach(self, ddp: core.DistributedDataParallel, *, starts_equal: bool) -> None:
        reducer = ddp._reducer
        transport = reducer.transport
        if transport.world_size == 1 or transport.store is None:
            return
        named = [(spec.name, param) for spec, param in zip(reducer.plan.params, reducer.params, strict=True)]
        checks = checks_of_drift(named, starts_equal=starts_equal)
        if not (has_streams(ddp.device) or self.shares):  # ranks may have different numbers of shares
            checks["slow_rank"] = SlowRank()
        self.guard = Guard(named, transport, checks, raises=self.raises, num_passes=reducer.num_passes)
        reducer.modes.append(self.guard)
        if (hook := ddp._registered_hook) is not None:
            self.guard.call("communication_hook", hook.name, hook.state)

    def change_ranks(self, ddp: core.DistributedDataParallel) -> None:
        if self.guard is not None:
            self.guard.close()
            ddp._reducer.modes.remove(self.guard)
            self.guard = None
        self.attach(ddp, starts_equal=False)

    def pre_forward(self, ddp: core.DistributedDataParallel) -> None:
        if (guard := self._looking(ddp)) is not None:
            guard.call("pre_forward")

    def before_module(self, ddp: core.DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        if (guard := self._looking(ddp)) is not None:
            guard.before_module(ddp._reducer.num_passes, inputs, kwargs)

    def post_forward(self, ddp: core.DistributedDataParallel) -> None:
        if (guard := self._looking(ddp)) is not None:
            guard.call("post_forward", ddp.require_backward_grad_sync)

    def _looking(self, ddp: core.DistributedDataParallel) -> Guard | None:
        if self.guard is None or not self.guard.looks or (self.shares and not ddp.require_backward_grad_sync):
            return None
        return self.guard


@dataclass(eq=False)
class FiniteGradients(Extension):
    """Tests buckets for NaN and infinity before they are reduced."""

    def agreed(self) -> Mapping[str, object]:
        return {"check_finite": True}

    def check(self, arguments: Mapping[str, Any]) -> None:
        if arguments["delay_all_reduce_named_params"]:
            exclude("`delay_all_reduce_named_params`", {"`check_finite`": True})

    def attach(self, ddp: core.DistributedDataParallel, *, starts_equal: bool) -> None:
        ddp._reducer.modes.append(CheckFinite(ddp._reducer))


@dataclass(eq=False)
class Shares(Extension):
    """Cuts a batch into `count` shares, whose sum does not depend on which rank computes which share."""

    count: int
    logical_ranks: LogicalRanks | None = field(default=None, init=False)

    synchronizes_buffers = True  # once per step

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"`logical_ranks` takes a number of shares, 1 or more, but got {self.count!r}.")

    def agreed(self) -> Mapping[str, object]:
        return {"logical_ranks": self.count}

    def check(self, arguments: Mapping[str, Any]) -> None:
        others = {
            "`static_graph`": bool(arguments["static_graph"]),  # its first backward is reduced at the end
            "`batched_grad_copy`": bool(arguments["batched_grad_copy"]),  # it divides
            "`skip_all_reduce_unused_params`": bool(arguments["skip_all_reduce_unused_params"]),
            "mixed_precision": arguments["mixed_precision"] is not None,
            "delay_all_reduce_named_params": bool(arguments["delay_all_reduce_named_params"]),
            'transport="nccl"': arguments["transport"] == "nccl",
        }
        exclude("`logical_ranks`", others)

    def attach(self, ddp: core.DistributedDataParallel, *, starts_equal: bool) -> None:
        sparse = sparse_parameters(ddp.module)
        others = {
            f"sparse gradients ({', '.join(sorted(sparse))})": bool(sparse),
            "forward_sync_buffers=False": bool(ddp._buffers_in_step.named) and not ddp.forward_sync_buffers,
        }
        exclude("`logical_ranks`", others)
        self._sum_over_shares(ddp)
        self.logical_ranks = LogicalRanks(ddp._reducer, ddp._buffers_in_step, self.count)

    def _sum_over_shares(self, ddp: core.DistributedDataParallel) -> None:
        takes_mean = ddp._options.reduction == "mean"
        ddp._reducer.reduce_strategy = TreeReduceStrategy(ddp._transport, self.count, takes_mean=takes_mean)

    def change_ranks(self, ddp: core.DistributedDataParallel) -> None:
        """New ranks may have different buckets."""
        self._sum_over_shares(ddp)
        ddp._reducer.store.begin_anew(ddp._transport.allocate)

    def pre_forward(self, ddp: core.DistributedDataParallel) -> None:
        assert self.logical_ranks is not None
        self.logical_ranks.forward_begins()


@dataclass(eq=False)
class TunedBuckets(Extension):
    """Observes some steps, and chooses the buckets by them."""

    tuner: AutoBuckets | None = field(default=None, init=False)

    def agreed(self) -> Mapping[str, object]:
        return {"bucket_cap_mb": AUTO}

    def check(self, arguments: Mapping[str, Any]) -> None:
        order_may_change = arguments["find_unused_parameters"] and not arguments["static_graph"]
        others = {
            "`bucket_cap_mb_list`": arguments["bucket_cap_mb_list"] is not None,
            "`first_bucket_cap_mb`": arguments["first_bucket_cap_mb"] is not None,
            "`find_unused_parameters`": bool(order_may_change),
        }
        exclude('`bucket_cap_mb="auto"`', others)
        clock_of(param.device for param in arguments["module"].parameters())  # raises where nothing can be timed

    def attach(self, ddp: core.DistributedDataParallel, *, starts_equal: bool) -> None:
        self.tuner = AutoBuckets(ddp._reducer, clock_of(param.device for param in ddp._reducer.params))

    def before_module(self, ddp: core.DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        assert self.tuner is not None
        self.tuner.before_forward()


def tools_for(
    stuck_after_s: float | None,
    on_drift: str | None,
    logical_ranks: int | None,
    check_finite: bool,
    tunes_buckets: bool,
) -> Iterator[Extension]:
    """The extensions that these arguments request.

    Raises:
        TypeError, ValueError: an argument is wrong, or two exclude each other.
    """
    check_flag("check_finite", check_finite)
    if on_drift not in ON_DRIFT:
        raise ValueError(f"`on_drift` is one of {', '.join(map(repr, ON_DRIFT))}, but got {on_drift!r}.")
    if stuck_after_s is not None:
        if not stuck_after_s > 0:
            raise ValueError(f"`stuck_after_s` takes seconds, more than 0, or None, but got {stuck_after_s!r}.")
        yield WatchedWaits(stuck_after_s)
    if logical_ranks is not None:
        others = {"`check_finite`": bool(check_finite), f'`bucket_cap_mb="{AUTO}"`': tunes_buckets}
        exclude("`logical_ranks`", others)
        yield Shares(logical_ranks)
    if check_finite:
        yield FiniteGradients()
    if on_drift is not None:
        yield Guarded(raises=on_drift == "raise", shares=logical_ranks is not None)
    if tunes_buckets:
        yield TunedBuckets()


class DistributedDataParallel(surface.DistributedDataParallel):
    """Data parallelism for one module: every rank's `.grad` is the mean over the ranks when backward returns.

    A drop-in replacement for torch 2.15's class, with the same results to the bit. minddp's own parameters are
    keyword-only. `minddp.ddp.DistributedDataParallel` documents those that are not listed here.

    Args:
        bucket_cap_mb: capacity of a bucket in MiB; by default 25, and the first 1. "auto": see `tools/forecast/`.
        stuck_after_s: time to wait for other ranks before a diagnosis; `None` makes none. See docs/stuck.md.
        on_drift: the reaction when training goes wrong without an error, for instance when replicas differ: "warn"
            logs a warning on rank 0, "raise" also raises `ReplicasDrift` in the next forward of every rank, `None`
            switches the guard off. A slow rank only causes a warning. See `tools/watchdog/guard.py`.
        logical_ranks: cut each batch into this many shares; same bits on any number of ranks. See `shares`.
        check_finite: raise `FloatingPointError` on every rank at the end of a backward in which a gradient of some
            rank has NaN or infinity, naming rank and parameter. It does not see a sum or a communication hook that
            overflows. Not with a GradScaler, nor in a CUDA graph. See docs/not_finite.md.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        transport: str | Transport = "auto",
        first_bucket_cap_mb: float | None = None,
        reduction: str = "mean",
        extensions: Sequence[Extension] = (),
        stuck_after_s: float | None = 10.0,
        on_drift: str | None = "warn",
        logical_ranks: int | None = None,
        check_finite: bool = False,
    ):
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        requests = {name: arguments.pop(name) for name in REQUESTS}
        tunes_buckets = isinstance(bucket_cap_mb, str)
        if tunes_buckets and arguments.pop("bucket_cap_mb") != AUTO:
            raise TypeError(f'`bucket_cap_mb` takes mebibytes as a number or "auto", but got {bucket_cap_mb!r}.')
        arguments["extensions"] = (*tools_for(tunes_buckets=tunes_buckets, **requests), *extensions)
        super().__init__(**arguments)

    def _extension(self, kind: type[Any]) -> Any:
        return next((extension for extension in self.extensions if isinstance(extension, kind)), None)

    @property
    def guard(self) -> Guard | None:
        """Its `checks` look for silent trouble; add to them before training."""
        return (guarded := self._extension(Guarded)) and guarded.guard

    @property
    def logical_ranks(self) -> LogicalRanks | None:
        """Deals the shares of each step to the ranks."""
        return (shares := self._extension(Shares)) and shares.logical_ranks

    @property
    def tuning(self) -> Tuning | None:
        """The outcome of `bucket_cap_mb="auto"`, once there is one."""
        return (tuned := self._extension(TunedBuckets)) and tuned.tuner.tuning

    def shares(self) -> Iterator[int]:
        """With `logical_ranks`: yield the numbers, from 0, of the shares of a step that this rank computes.

        Each share has one forward and one backward in the loop, on its part of the batch, with its own random state
        and the buffers from the beginning of the step. After the loop `.grad` is the mean over the shares of all
        ranks. An optimizer step within the loop raises. See `tools/elastic/`.

        Raises:
            RuntimeError: no `logical_ranks`; or a share had no backward, or more than one.
        """
        if self.logical_ranks is None:
            raise RuntimeError("There are no shares: pass logical_ranks to DistributedDataParallel.")
        if self._join_config.enable:
            raise RuntimeError(
                "`shares` and `join` exclude each other: with shares every rank has the same inputs."
            )
        return self.logical_ranks.shares(self)

    def overlap_optimizer(self, optimizer: torch.optim.Optimizer) -> OverlappedOptimizer:
        """Step each bucket's parameters as soon as its averages are available; see `modes/optimizer_overlap.py`.

        Leave out `optimizer.step()` in the training loop. The handle's `remove()` undoes it.

        Raises:
            ValueError: an optimizer that cannot be stepped piece by piece, or has parameters that are not in a
                bucket of this wrapper; or `check_finite`.
        """
        why = "parameters would be stepped before it is known that all gradients are finite"
        exclude("`overlap_optimizer`", {"check_finite": self._extension(FiniteGradients) is not None}, why)
        return OverlappedOptimizer(optimizer, self.module, self._reducer.params, self._reducer.modes)

    # ------------------------------------------------------------------ what the tools exclude

    def weigh(self, weight: float) -> None:
        exclude("`weigh`", {"logical_ranks": self.logical_ranks is not None}, "every share counts the same")
        super().weigh(weight)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        if self.logical_ranks is not None:
            raise RuntimeError("register_comm_hook and `logical_ranks` exclude each other: the shares' tree adds.")
        super().register_comm_hook(state, hook)
        if self.guard is not None and (registered := self._registered_hook) is not None:
            self.guard.call("communication_hook", registered.name, state)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        why = "a rank without inputs makes no steps to be observed"
        exclude("`join`", {f'bucket_cap_mb="{AUTO}"': self._extension(TunedBuckets) is not None}, why)
        return super().join_hook(**kwargs)
