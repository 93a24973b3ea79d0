"""The class that `import minddp` exports: the wrapper, and an extension for each argument that requests a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from minddp.compat import surface
from minddp.extension import Extension
from minddp.modes.optimizer_overlap import OverlappedOptimizer
from minddp.options import check_flag, exclude
from minddp.tools.elastic.logical_ranks import LogicalRanks, Shares
from minddp.tools.forecast.auto_buckets import AUTO, AutoBuckets, Tuning
from minddp.tools.watchdog.finite import FiniteGradients
from minddp.tools.watchdog.guard import Guard, Guarded
from minddp.tools.watchdog.watched_transport import WatchedWaits
from minddp.transport.protocols import Transport

ON_DRIFT = ("warn", None)
REQUESTS = ("stuck_after_s", "on_drift", "logical_ranks", "check_finite")  # arguments of tools


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
        yield Guarded(shares=logical_ranks is not None)
    if tunes_buckets:
        yield AutoBuckets()


class DistributedDataParallel(surface.DistributedDataParallel):
    """Data parallelism for one module: every rank's `.grad` is the mean over the ranks when backward returns.

    A drop-in replacement for torch 2.15's class, with the same results to the bit. minddp's own parameters are
    keyword-only. `minddp.ddp.DistributedDataParallel` documents those that are not listed here.

    Args:
        bucket_cap_mb: capacity of a bucket in MiB; by default 25, and the first 1. "auto": see `tools/forecast/`.
        stuck_after_s: time to wait for other ranks before a diagnosis; `None` makes none. See docs/stuck.md.
        on_drift: "warn": rank 0 logs a warning when training goes wrong without an error, for instance when
            replicas differ; `None` switches this guard off. See `tools/watchdog/guard.py`.
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
        return (tuned := self._extension(AutoBuckets)) and tuned.tuning

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
        exclude("`join`", {f'bucket_cap_mb="{AUTO}"': self._extension(AutoBuckets) is not None}, why)
        return super().join_hook(**kwargs)
