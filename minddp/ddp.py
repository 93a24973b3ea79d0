"""The public wrapper: what happens at construction and around forward, in which order, and which module does it.

    construction    check the arguments                       options, modes/delayed, replicas/placement
                    is it the same model on every rank?       replicas/agreement, by a transport
                    give all of them rank 0's weights         replicas/broadcast, replicas/buffers
                    buckets, and hooks on parameters          strategies, core/reducer
    forward         is the module still that one?             replicas/module_watch
                    do other ranks take part in this step?    modes/join
                    rebuild the buckets in observed order     core/reducer, forecast
                    rank 0's buffers for all                  replicas/buffers
                    inputs on their device, in their dtype    replicas/placement, modes/mixed_precision
                    *the module runs*
                    expect a backward                         core/reducer
    backward        autograd calls the reducer's hooks, without the wrapper

Torch's `DistributedDataParallel` is the model for everything visible here: the constructor's parameters, their
order and defaults, the attributes, the errors. `torch/nn/parallel/distributed.py` is the source behind each
"as torch" below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group

from minddp.comm_hooks import CommHook, HookReducing
from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan
from minddp.forecast import AutoBuckets, Tuning, clock_of
from minddp.modes.delayed import DelayedAllReduce, delayed_parameters, names_of
from minddp.modes.divisor import Divisor
from minddp.modes.join import UnevenInputs
from minddp.modes.mixed_precision import MixedPrecision
from minddp.modes.optimizer_overlap import OverlappedOptimizer
from minddp.options import Options, warn_of_deprecated
from minddp.replicas import broadcast as replicas
from minddp.replicas.agreement import Replica, verify_replicas_agree
from minddp.replicas.buffers import BufferHook, Buffers
from minddp.replicas.module_watch import ModuleWatch
from minddp.replicas.placement import Placement, check_module, is_default_group, resolve_group, sparse_parameters
from minddp.strategies import Strategies
from minddp.transport import open_transport
from minddp.transport.protocols import Transport
from minddp.watchdog import Progress, progress_of, watched

#: Attributes that a pickle leaves out: they belong to this process and its group.
CONNECTED = (
    "process_group",
    "_transport",
    "_divisor",
    "_mixed_precision",
    "_strategies",
    "_reducer",
    "_comm_hook",
    "_module_watch",
    "_tuner",
)


class DistributedDataParallel(nn.Module, UnevenInputs):
    """Data parallelism for one module: every rank's `.grad` is the mean over the ranks when backward returns.

    A drop-in for `torch.nn.parallel.DistributedDataParallel` of torch 2.13: same parameters, same results to
    the bit. minddp's own parameters are keyword-only and come last.

    Args:
        module: the module to wrap; at least one parameter must require grad.
        device_ids: at most one device, for a module on a GPU: inputs are moved there.
        output_device: as torch; only stored.
        dim: as torch; only stored.
        broadcast_buffers: deprecated by torch 2.13 for `forward_sync_buffers`; False also leaves the buffers
            out of the broadcast at construction.
        init_sync: verify that replicas agree and broadcast rank 0's parameters and buffers.
        process_group: the ranks to average over; the default group if None.
        bucket_cap_mb: capacity of a bucket in MiB. By default 25, and 1 for the first bucket. "auto" observes
            some steps and chooses the buckets that expose the least communication; see `forecast/`.
        find_unused_parameters: parameters may go without gradient, and other ones on other ranks.
        check_reduction: deprecated; has no effect, as in torch.
        gradient_as_bucket_view: `.grad` shares memory with the buckets.
        static_graph: the same parameters are used in the same way in every iteration.
        delay_all_reduce_named_params: (name, parameter) pairs whose all-reduce waits for the gradient of
            `param_to_hook_all_reduce`; see `modes/delayed.py`.
        param_to_hook_all_reduce: see there.
        mixed_precision: torch's `_MixedPrecision`: dtypes in which to compute and to reduce; see
            `modes/mixed_precision.py`.
        device_mesh: a one-dimensional mesh instead of a process group. Cut from a larger mesh, the other
            dimensions may be tensor parallelism.
        skip_all_reduce_unused_params: do not reduce buckets of unused parameters only; they must be the same
            on every rank.
        bucket_cap_mb_list: a capacity in MiB for each bucket, the last one repeating.
        batched_grad_copy: copy first and divide once per bucket; as torch, the mean is then a true division.
        forward_sync_buffers: broadcast rank 0's buffers before each forward.
        transport: how gradients travel. "process_group" is its backend, "shared_memory" memory that the ranks of
            one host share, with gloo's bits, "auto" the latter where it is available, "hierarchical" memory within
            hosts and gloo between them, "nccl" NCCL through CuPy. See `open_transport` and docs/hosts.md.
        first_bucket_cap_mb: capacity of the first bucket alone, in MiB.
        reduction: "mean" over the ranks, or "sum". For a mean weighted by rank see `weigh`.
        lazy_bucket_allocation: make the first buckets in the first backward, not at construction; later torch has
            it, too. See `core/bucket_store.py`.
        stuck_after_s: how long to wait for other ranks before asking them what is the matter; `None` never asks.
            See `watchdog/`.

    Attributes:
        module: the wrapped module.
        plan: the current `BucketPlan`; print it.
        require_backward_grad_sync: whether the next backward is synchronised; see `no_sync`.
        require_manual_backward_finalization: whether that is left to `finalize_backward`; False at first.

    Raises:
        ValueError, TypeError: wrong arguments, or no process group.
        RuntimeError: nothing requires grad, lazy parameters, or replicas that differ (names the parameter, the
            rank and both sides).
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
        *,
        transport: str = "auto",
        first_bucket_cap_mb: float | None = None,
        reduction: str = "mean",
        stuck_after_s: float | None = 30.0,
        lazy_bucket_allocation: bool = False,
    ):
        super().__init__()
        UnevenInputs.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps an nn.Module, but got {type(module).__name__}.")
        self._options = Options.checked(
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            first_bucket_cap_mb=first_bucket_cap_mb,
            reduction=reduction,
            stuck_after_s=stuck_after_s,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)
        delayed = delayed_parameters(
            module,
            delay_all_reduce_named_params,
            param_to_hook_all_reduce,
            reduction=reduction,
            mixed_precision=mixed_precision,
        )
        self.process_group = resolve_group(process_group, device_mesh, module)
        self.parameters_to_ignore = {
            *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
            *names_of(module, delayed.values()),
        }
        check_module(module, self.parameters_to_ignore, delayed.values())
        if self._options.tunes_buckets:
            clock_of(param.device for param in module.parameters())  # raises where nothing can be timed
        self._placement = Placement.checked(module, self.parameters_to_ignore, device_ids, output_device)
        self.module = module
        self.dim = dim
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self.forward_sync_buffers = self._options.forward_sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.require_manual_backward_finalization = False
        self._transport_kind = transport
        self._meet(delayed, param_to_hook_all_reduce)
        self._connect()
        if self._mixed_precision is not None:
            self._mixed_precision.cast_buffers(module, self.parameters_to_ignore)

    def _meet(self, delayed: dict[str, nn.Parameter], trigger: Any) -> None:
        """The other ranks: see that they have the same model, and give them rank 0's weights."""
        init_sync = self._options.init_sync
        self._transport = self._open_transport("process_group")
        self._buffers_in_step = Buffers(self.module, self.parameters_to_ignore)
        if init_sync:
            self._verify_that_ranks_agree(delayed)
        if self._transport_kind != "process_group" and (init_sync or self._transport_kind != "auto"):
            self._transport = self._open_transport(self._transport_kind)  # collective, as is init_sync
        self._delayed = DelayedAllReduce(delayed, trigger, self._transport) if delayed else None
        if init_sync:  # before there are buckets: both take as much memory as the parameters
            self.synchronize(buffers=self._options.init_sync_buffers)
        elif self._delayed is not None:
            self._delayed.broadcast(source=0)  # as torch, whatever init_sync says

    def _connect(self) -> None:
        """Reducer and hooks: with the transport all that a pickle leaves behind."""
        ignored, sparse = self.parameters_to_ignore, sparse_parameters(self.module)
        self._comm_hook: CommHook | None = None
        self._divisor = Divisor(self._transport, self._options.reduction)
        self._mixed_precision: MixedPrecision | None = None
        if self.mixed_precision is not None:
            self._mixed_precision = MixedPrecision(self.mixed_precision, self.module, ignored, sparse)
        self._strategies = Strategies(
            self._options, self._reduced_params(), sparse, self._divisor.for_this_backward, self._mixed_precision
        )
        self._reducer = self._strategies.reducer(self._transport)
        params = self._reducer.params
        named = self.module.named_parameters(remove_duplicate=False)
        left_alone = [param for name, param in named if name in ignored]
        self._module_watch = ModuleWatch(self.module, [*params, *left_alone], ignored)
        self._tuner: AutoBuckets | None = None
        if self._options.tunes_buckets:
            self._tuner = AutoBuckets(self._reducer, clock_of(param.device for param in params))

    # ------------------------------------------------------------------ the other ranks

    def _reduced_params(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters to reduce: those that require grad, in registration order, tied ones once.

        As torch, a tied parameter is left out only if it is ignored in each submodule that has it.
        """
        first_name: dict[nn.Parameter, str] = {}
        for prefix, submodule in self.module.named_modules():
            for name, param in submodule.named_parameters(prefix, recurse=False):
                if param.requires_grad and name not in self.parameters_to_ignore:
                    first_name.setdefault(param, name)
        return [(name, param) for param, name in first_name.items()]

    def _verify_that_ranks_agree(self, delayed: dict[str, nn.Parameter]) -> None:
        """Before anything else is sent, and by the transport that every rank has. See `replicas/agreement.py`."""
        options, buffers, ignored = self._options, self._buffers_in_step.named, self.parameters_to_ignore
        travels = options.init_sync_buffers or options.forward_sync_buffers
        frozen = [(n, p) for n, p in self.module.named_parameters() if not (p.requires_grad or n in ignored)]
        ours = Replica.of(
            self._reduced_params(),
            others=[*frozen, *delayed.items(), *(buffers.items() if travels else ())],
            ignored=ignored,
            options=options,
            transport=self._transport_kind,
            broadcast_buffers=options.init_sync_buffers and bool(buffers),
            forward_sync_buffers=options.forward_sync_buffers and bool(buffers),
            mixed_precision=repr(self.mixed_precision),
            tunes_buckets=options.tunes_buckets,
        )
        agreed = verify_replicas_agree(self._transport, ours, self.device)
        self._options = replace(options, caps=agreed.bucket_caps())

    def _open_transport(self, kind: str) -> Transport:
        transport = open_transport(kind, self.process_group, self.device)
        return watched(transport, self._options.stuck_after_s, self._progress)

    def _progress(self) -> Progress:
        """Called from another thread, perhaps before construction is over."""
        if not hasattr(self, "_reducer"):
            return Progress("IDLE", 0)
        return progress_of(self._reducer, accumulates=not self.require_backward_grad_sync)

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_module(*inputs, **kwargs))

    def _run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._reducer.events.emit(EventKind.FORWARD_BEGIN)
        if torch.is_grad_enabled():
            self._module_watch.look(everywhere=self._reducer.phase is Phase.INCOMPLETE)
            self._reducer.ensure_finished()
        self._announce_to_joined_ranks()
        if torch.is_grad_enabled():
            self._reducer.rebuild_if_due()
            if self._tuner is not None:
                self._tuner.before_forward()
        if self._synchronizes_buffers(after_forward=False):
            self._synchronize_buffers()
        inputs, kwargs = self._placement.move(inputs, kwargs)
        if self._mixed_precision is not None:
            return self._mixed_precision.begin_forward(inputs, kwargs, self._reducer.hooks.renew)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if self._synchronizes_buffers(after_forward=True):
            self._synchronize_buffers()
        # Buffers are synchronised before a forward only if the forward before it was one that trains: torch's
        # rule, which keeps evaluation and accumulation free of communication.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self._reducer.arm(output, finalize_at_end=not self.require_manual_backward_finalization)
        elif torch.is_grad_enabled():
            self._reducer.events.emit(EventKind.NO_SYNC)
        if self._mixed_precision is not None:
            self._mixed_precision.end_forward(output)
        if self._delayed is not None:
            self._delayed.provide_grads()
        self._reducer.events.emit(EventKind.FORWARD_END)
        return output

    # ------------------------------------------------------------------ backward: when and how it is reduced

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate locally; the next synchronised backward reduces their sum.

        The forward must be inside too: it is the forward that decides whether its backward is synchronised.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last backward and put the averages into `.grad`.

        With `require_manual_backward_finalization` the end of backward leaves this to the caller, which may have
        better things to do while gradients travel. Also within backward, for instance in a hook, as soon as all
        gradients of this module have arrived; but see `should_finalize_after_backward`. As in torch after 2.13.

        Raises:
            RuntimeError: there is nothing to finalize, or some gradients have not arrived.
        """
        self._reducer.finish()

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if the coming backward launches nothing before it has ended: the first one of a static graph."""
        return self._reducer.expectation.is_recording

    def weigh(self, weight: float) -> None:
        """Let the next backward take the mean weighted by each rank's `weight`, such as its number of samples.

        To be called on every rank, before or after the forward. Its sum over the ranks travels meanwhile. What
        has been accumulated under `no_sync` counts with the weight of the backward that reduces it. A rank of
        weight 0 contributes nothing, not even a NaN.

        Raises:
            ValueError: a weight that is negative or not finite, or something else decides what is divided by what.
        """
        for other, is_on, why in (
            ("mixed_precision", self._mixed_precision is not None, "it divides sums, all alike"),
            ("a communication hook", self._comm_hook is not None, "the hook owns the arithmetic"),
            ("delay_all_reduce_named_params", self._delayed is not None, "it divides by the number of ranks"),
            ("join", self._join_config.enable, "a rank that has run out of inputs would have to weigh, too"),
        ):
            if is_on:
                raise ValueError(f"`weigh` and {other} exclude each other: {why}.")
        self._divisor.weigh(weight, self.device)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket; it returns a future of the bucket's new tensor.

        Nothing is divided by the world size then: the hook owns the arithmetic.

        Raises:
            TypeError, ValueError: the hook does not fit.
            RuntimeError: a hook is registered already, or mixed_precision does its own reduction.
        """
        if self._mixed_precision is not None:
            raise RuntimeError(
                "register_comm_hook and `mixed_precision` exclude each other: a hook may step an optimizer, but "
                "during backward parameters are low-precision copies. Compute under torch.autocast instead."
            )
        checked = CommHook.checked(state, hook)
        if self._options.reduction != "mean":
            raise ValueError(
                f'`reduction` ("{self._options.reduction}") and a communication hook (`{checked.name}`) exclude '
                f"each other: the hook owns the arithmetic."
            )
        if self._comm_hook is not None:
            raise RuntimeError(
                f"register_comm_hook or register_builtin_comm_hook can only be called once, but "
                f"`{self._comm_hook.name}` is registered and so cannot be `{checked.name}`."
            )
        self._comm_hook = checked
        watch_future = getattr(self._transport, "watch_future", None)  # where waits are watched
        self._reducer.reducing = HookReducing(checked, self._reducer.events, watch_future)

    def overlap_optimizer(self, optimizer: torch.optim.Optimizer) -> OverlappedOptimizer:
        """Step each bucket's parameters as soon as its averages are there; see `modes/optimizer_overlap.py`.

        The training loop then leaves out `optimizer.step()`. The handle's `remove()` undoes it.

        Raises:
            ValueError: an optimizer that cannot be stepped piece by piece.
        """
        return OverlappedOptimizer(optimizer, self._reducer.modes)

    # ------------------------------------------------------------------ replicas and their buffers

    def synchronize(self, source: int = 0, *, buffers: bool = True) -> None:
        """Overwrite parameters and buffers on every rank with those of rank `source`. Collective."""
        state: list[torch.Tensor] = [
            param for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore
        ]
        if buffers:
            self._buffers_in_step.collect()
            state += self._buffers_in_step.tensors
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, state, source)
        if self._delayed is not None:
            self._delayed.broadcast(source)

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward begins or ends with a synchronisation of the buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffers_in_step.named)

    def _synchronizes_buffers(self, *, after_forward: bool) -> bool:
        hook = self._buffers_in_step.hook
        return self.will_sync_module_buffers() and after_forward == (hook is not None and hook.after_forward)

    def _synchronize_buffers(self) -> None:
        """Rank 0's buffers for all; under `join`, those of the highest rank that still has inputs."""
        self._reducer.events.emit(EventKind.BUFFERS_BEGIN)
        self._reducer.backward_end.futures += self._buffers_in_step.synchronize(self._transport, self._buffers_from)
        self._reducer.events.emit(EventKind.BUFFERS_BROADCAST, len(self._buffers_in_step.named))

    def register_buffer_hook(
        self, state: Any, hook: Callable[[Any, dict[str, torch.Tensor]], Any], *, after_forward: bool = True
    ) -> None:
        """Let `hook(state, {name: buffer})` synchronise the buffers instead of a broadcast from rank 0.

        Futures that it returns are waited for at the end of backward.

        Raises:
            TypeError: not callable.
        """
        if not callable(hook):
            raise TypeError(f"A buffer hook must be callable, but is {hook!r}.")
        self._buffers_in_step.hook = BufferHook(state, hook, after_forward)

    # ------------------------------------------------------------------ changes after construction

    def become_static(self) -> None:
        """From now on as if constructed with static_graph=True; only before training begins."""
        with self._reducer.events.reporting():
            if self._reducer.num_passes or self._reducer.phase is not Phase.IDLE:
                raise RuntimeError(
                    "set_static_graph() should be called before training loop starts and after "
                    "DistributedDataParallel is constructed. Pass static_graph=True to the constructor."
                )
        self._options = replace(self._options, static_graph=True)
        self._strategies = replace(self._strategies, options=self._options)
        self._reducer.expect(self._strategies.expectation(self._reducer.hooks))

    def move_to_group(self, process_group: dist.ProcessGroup) -> None:
        """Go on with the ranks of another group, whatever has become of the last backward.

        To be called on all its ranks between steps. Communication hooks keep the group that they know.
        """
        self.process_group = process_group
        self._transport = self._open_transport(self._transport_kind)
        self._divisor.change_ranks(self._transport)
        all_reduce = self._strategies.all_reduce(self._transport)
        self._reducer.change_ranks(self._transport, self._reducer.reducing if self._comm_hook else all_reduce)
        if self._delayed is not None:
            self._delayed.change_ranks(self._transport)

    # ------------------------------------------------------------------ copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if not is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: "
                "a copy could not know which ranks to average over. Pickle `.module` instead."
            )
        if self._delayed is not None:
            raise RuntimeError("With delay_all_reduce_named_params there can be no copy. Copy `.module` instead.")
        state = copy.copy(self.__dict__)
        for connected in CONNECTED:
            del state[connected]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect a copy to the default group; as in torch with the buffer hook, without the communication hook.

        Its gradients travel by the process group: any other transport takes all ranks to open, and this rank may be
        the only one that makes a copy.
        """
        super().__setstate__(state)
        self.process_group = _get_default_group()
        self._transport_kind = "process_group"
        self._transport = self._open_transport(self._transport_kind)
        self._connect()

    # ------------------------------------------------------------------ what can be asked

    @property
    def plan(self) -> BucketPlan:
        """Which gradient travels in which bucket, and in which order they leave."""
        return self._reducer.plan

    @property
    def tuning(self) -> Tuning | None:
        """What `bucket_cap_mb="auto"` has come to, as soon as it has."""
        return None if self._tuner is None else self._tuner.tuning

    @property
    def device(self) -> torch.device:
        return self._placement.device

    @property
    def device_type(self) -> str:
        return self._placement.device.type

    @property
    def device_ids(self) -> list[int] | None:
        return self._placement.device_ids

    @property
    def output_device(self) -> int | None:
        return self._placement.output_device

    @property
    def find_unused_parameters(self) -> bool:
        return self._options.find_unused_parameters

    @property
    def gradient_as_bucket_view(self) -> bool:
        return self._options.gradient_as_bucket_view

    @property
    def static_graph(self) -> bool:
        return self._options.static_graph

    @property
    def broadcast_buffers(self) -> bool:
        """The name before torch 2.13 of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value
