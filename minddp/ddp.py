"""The public wrapper: what happens at construction and around forward, in which order, and which module does it.

    construction    check the arguments                       options, modes/delayed, replicas/placement
                    is it the same model on every rank?       replicas/agreement, by a transport
                    give all of them rank 0's weights         replicas/broadcast, replicas/buffers
                    buckets, and hooks on parameters          strategies, core/reducer
    forward         is the module still that one?             replicas/module_change_check
                    do other ranks take part in this step?    modes/join
                    rebuild the buckets in observed order     core/reducer, forecast
                    rank 0's buffers for all                  replicas/buffers
                    inputs on their device, in their dtype    replicas/placement, modes/mixed_precision
                    *the module runs*
                    expect a backward                         core/reducer
    backward        autograd calls the reducer's hooks, without the wrapper

Parameters, their order and defaults, attributes and errors are those of `torch/nn/parallel/distributed.py`, the
source behind each "as torch" below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group

from minddp.comm_hooks import CommHook, HookReducing
from minddp.core.autograd import recorded
from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan
from minddp.core.reduction import Reducing
from minddp.extension import Extension
from minddp.modes.delayed import DelayedAllReduce, delayed_parameters, names_of
from minddp.modes.divisor import Divisor
from minddp.modes.join import UnevenInputs
from minddp.modes.mixed_precision import MixedPrecision
from minddp.options import Options, check_flag, exclude, warn_of_deprecated
from minddp.replicas import broadcast as replicas
from minddp.replicas.agreement import Replica, verify_replicas_agree
from minddp.replicas.buffers import BufferHook, Buffers
from minddp.replicas.module_change_check import ModuleChangeCheck
from minddp.replicas.optimizer_state import broadcast_optimizer_state, check_optimizer
from minddp.replicas.placement import (
    Placement,
    check_module,
    is_default_group,
    reduced_parameters,
    resolve_group,
    sparse_parameters,
)
from minddp.strategies import Strategies
from minddp.transport import open_transport
from minddp.transport.protocols import Transport

#: Attributes that a pickle leaves out: they belong to this process and its group.
CONNECTED = (
    "process_group",
    "_transport",
    "_divisor",
    "_mixed_precision",
    "_strategies",
    "_reducer",
    "_registered_hook",
    "_module_change_check",
)


class DistributedDataParallel(nn.Module, UnevenInputs):
    """Data parallelism for one module: every rank's `.grad` is the mean over the ranks when backward returns.

    A drop-in for torch 2.15's, with the same results to the bit. minddp's own parameters are keyword-only.

    Args:
        module: the module to wrap; at least one parameter must require grad.
        device_ids: at most one device, for a module on a GPU: inputs are moved there.
        output_device: as torch; only stored.
        dim: as torch; only stored.
        broadcast_buffers: deprecated `forward_sync_buffers`; False also broadcasts no buffers at construction.
        init_sync: verify that replicas agree and broadcast rank 0's parameters and buffers.
        process_group: the ranks to average over; the default group if None.
        bucket_cap_mb: capacity of a bucket in MiB; by default 25, and the first 1.
        find_unused_parameters: parameters may go without gradient, and other ones on other ranks.
        check_reduction: deprecated; has no effect, as in torch.
        gradient_as_bucket_view: `.grad` shares memory with the buckets.
        static_graph: the same parameters are used in the same way in every iteration.
        delay_all_reduce_named_params: (name, parameter) pairs with one late all-reduce; see `modes/delayed.py`.
        param_to_hook_all_reduce: the parameter whose gradient that all-reduce waits for.
        mixed_precision: torch's `_MixedPrecision`: dtypes to compute and reduce in; see `modes/mixed_precision.py`.
        device_mesh: a 1D mesh instead of a process group; cut from a larger one, the rest may be tensor parallel.
        skip_all_reduce_unused_params: do not reduce buckets of unused parameters only, equal on all ranks.
        bucket_cap_mb_list: a capacity in MiB for each bucket, the last one repeating.
        batched_grad_copy: copy first and divide once per bucket; as torch, the mean is then a true division.
        forward_sync_buffers: broadcast rank 0's buffers before each forward.
        lazy_bucket_allocation: buckets have memory during backward only; as torch 2.15. See `core/bucket_store.py`.
        transport: how gradients travel: "process_group", "shared_memory", "auto", "hierarchical" or "nccl", which
            `transport.open_transport` describes, or a `Transport` of your own. See docs/hosts.md.
        first_bucket_cap_mb: capacity of the first bucket alone, in MiB.
        reduction: "mean" over the ranks (weighted: see `weigh`), "sum", or a class of `Reducing` of your own.
        extensions: code that attaches to this wrapper without being known to it; see `extension.py`.

    Attributes:
        module: the wrapped module.
        plan: the current `BucketPlan`; print it.
        require_backward_grad_sync: whether the next backward is synchronised; see `no_sync`.
        require_manual_backward_finalization: whether that is left to `finalize_backward`. Set it before a forward.

    Raises:
        ValueError, TypeError: wrong arguments, or no process group.
        RuntimeError: nothing requires grad, lazy parameters, or replicas that differ.
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
        bucket_cap_mb: float | None = None,
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
        reduction: str | Callable[[Transport], Any] = "mean",
        extensions: Sequence[Extension] = (),
    ):
        arguments = locals()
        super().__init__()
        UnevenInputs.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps an nn.Module, but got {type(module).__name__}.")
        self._options = Options.checked(arguments)
        self.extensions = tuple(extensions)
        for extension in self.extensions:
            extension.check(arguments)
        warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)
        trigger = param_to_hook_all_reduce
        delayed = delayed_parameters(module, delay_all_reduce_named_params, trigger, self._options, mixed_precision)
        self.process_group = resolve_group(process_group, device_mesh, module)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = {*ignored, *names_of(module, delayed.values())}
        check_module(module, self.parameters_to_ignore, delayed.values())
        self._placement = Placement.checked(module, self.parameters_to_ignore, device_ids, output_device)
        self.module, self.dim = module, dim
        self.device_mesh, self.mixed_precision = device_mesh, mixed_precision
        self.forward_sync_buffers = self._options.forward_sync_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._require_manual_backward_finalization = False
        self._transport_kind = transport
        self._synchronize_replicas(delayed, trigger)
        self._build_reducer()
        for extension in self.extensions:
            extension.attach(self, starts_equal=self._options.init_sync)
        if self._mixed_precision is not None:
            self._mixed_precision.cast_buffers(module, self.parameters_to_ignore)

    def _synchronize_replicas(self, delayed: dict[str, nn.Parameter], trigger: Any) -> None:
        """The other ranks: see that they have the same model, and give them rank 0's weights."""
        init_sync, kind = self._options.init_sync, self._transport_kind
        self._transport = self._open_transport("process_group" if isinstance(kind, str) else kind)
        self._buffers_in_step = Buffers(self.module, self.parameters_to_ignore)
        if init_sync:
            self._verify_that_ranks_agree(delayed)
        if isinstance(kind, str) and kind != "process_group" and (init_sync or kind != "auto"):
            self._transport = self._open_transport(kind)  # collective, as is init_sync
        self._delayed = DelayedAllReduce(delayed, trigger, self._transport) if delayed else None
        if init_sync:  # before there are buckets: both take as much memory as the parameters
            self.synchronize(buffers=self._options.init_sync_buffers)
        elif self._delayed is not None:
            self._delayed.broadcast(source=0)  # as torch, whatever init_sync says

    def _build_reducer(self) -> None:
        """Reducer and hooks: with the transport all that a pickle leaves behind."""
        ignored, sparse = self.parameters_to_ignore, sparse_parameters(self.module)
        self._registered_hook: CommHook | None = None
        self._divisor = Divisor(self._transport, self._options.reduction)
        self._mixed_precision: MixedPrecision | None = None
        if self.mixed_precision is not None:
            self._mixed_precision = MixedPrecision(self.mixed_precision, self.module, ignored, sparse)
        self._strategies = Strategies(
            self._options,
            reduced_parameters(self.module, ignored),
            sparse,
            self._divisor.for_this_backward,
            self._mixed_precision,
        )
        self._reducer = self._strategies.reducer(self._transport)
        self._reducer.reducing = self._reducing()
        self._reducer.modes.append(self._divisor)
        params = self._reducer.params
        named = self.module.named_parameters(remove_duplicate=False)
        left_alone = [param for name, param in named if name in ignored]
        self._module_change_check = ModuleChangeCheck(self.module, [*params, *left_alone], ignored)

    # ------------------------------------------------------------------ the other ranks

    def _verify_that_ranks_agree(self, delayed: dict[str, nn.Parameter]) -> None:
        """Before anything else is sent, and by the transport that every rank has. See `replicas/agreement.py`."""
        options, buffers, ignored = self._options, self._buffers_in_step.named, self.parameters_to_ignore
        travels = options.init_sync_buffers or options.forward_sync_buffers
        frozen = [(n, p) for n, p in self.module.named_parameters() if not (p.requires_grad or n in ignored)]
        ours = Replica.of(
            reduced_parameters(self.module, ignored),
            others=[*frozen, *delayed.items(), *(buffers.items() if travels else ())],
            ignored=ignored,
            options=options,
            transport=self._transport_kind if isinstance(self._transport_kind, str) else "of your own",
            broadcast_buffers=options.init_sync_buffers and bool(buffers),
            forward_sync_buffers=options.forward_sync_buffers and bool(buffers),
            mixed_precision=repr(self.mixed_precision),
            **{name: value for extension in self.extensions for name, value in extension.agreed().items()},
        )
        agreed = verify_replicas_agree(self._transport, ours, self.device)
        self._options = replace(options, caps=agreed.caps)

    def _open_transport(self, kind: str | Transport) -> Transport:
        transport = kind if isinstance(kind, Transport) else open_transport(kind, self.process_group, self.device)
        for extension in self.extensions:
            transport = extension.wrap_transport(transport, self)
        return transport

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with recorded("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_module(*inputs, **kwargs))

    def _run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._reducer.events.emit(EventKind.FORWARD_BEGIN)
        if torch.is_grad_enabled():
            for extension in self.extensions:
                extension.pre_forward(self)
            self._module_change_check.check(everywhere=self._reducer.phase is Phase.INCOMPLETE)
            self._reducer.ensure_finished()
        self._announce_to_joined_ranks()
        if torch.is_grad_enabled():
            self._reducer.rebuild_if_due()
        synchronises_buffers = self._synchronizes_buffers(after_forward=False)
        if synchronises_buffers:
            self._synchronize_buffers()
        inputs, kwargs = self._placement.move(inputs, kwargs)
        if torch.is_grad_enabled():
            is_broadcast = synchronises_buffers and self._buffers_in_step.hook is None
            broadcast = self._buffers_in_step.named if is_broadcast else {}
            for extension in self.extensions:
                extension.before_module(self, broadcast, inputs, kwargs)
        if self._mixed_precision is not None:
            return self._mixed_precision.begin_forward(inputs, kwargs, self._reducer.hooks.renew)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if self._synchronizes_buffers(after_forward=True):
            self._synchronize_buffers()
        # Torch's rule: only after a forward that trains, so evaluation and accumulation need no communication.
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises != self.require_forward_param_sync:  # asked first: to set an attribute of a module is slow
            self.require_forward_param_sync = synchronises
        if torch.is_grad_enabled():
            for extension in self.extensions:
                extension.post_forward(self)
        if synchronises:
            self._reducer.arm(output, finalize_at_end=not self.require_manual_backward_finalization)
        elif torch.is_grad_enabled():
            self._reducer.events.emit(EventKind.NO_SYNC)
            if self._reducer.phase is Phase.ARMED and self._reducer.expectation.is_recording:
                # An earlier forward has had no backward: that of this one takes its place, as torch.
                self._reducer.watch(output)
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

    @property
    def require_manual_backward_finalization(self) -> bool:
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        check_flag("require_manual_backward_finalization", required)
        if required:
            self._check_manual_backward_finalization_supported()
        if required != self._require_manual_backward_finalization and self._reducer.phase is not Phase.IDLE:
            raise RuntimeError(
                "require_manual_backward_finalization cannot be called after forward while a backward pass is "
                "expected or in progress: set it before forward or after backward finalization."
            )
        self._require_manual_backward_finalization = bool(required)

    def _check_manual_backward_finalization_supported(self) -> None:
        if not self._reducer.params:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params."
            )

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last backward and put the averages into `.grad`.

        With `require_manual_backward_finalization` backward leaves this to the caller. In backward, too, as soon
        as all gradients of this module have arrived; but see `should_finalize_after_backward`. As torch 2.15.

        Raises:
            RuntimeError: it is not required, there is nothing to finalize, or some gradients have not arrived.
        """
        self._check_manual_backward_finalization_supported()
        self._reducer.finish(is_required=self._require_manual_backward_finalization)

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if `finalize_backward` has to wait until the coming backward has returned: torch's rule."""
        waits = self._reducer.awaits_order or self._reducer.expectation.is_recording
        return self._require_manual_backward_finalization and (waits or self.mixed_precision is not None)

    def weigh(self, weight: float) -> None:
        """Let the next backward take the mean weighted by each rank's `weight`, such as its number of samples.

        To be called on every rank, before or after the forward: between two forwards it weighs the second. Its sum
        over the ranks travels meanwhile. What has been accumulated under `no_sync` counts with the weight of the
        backward that reduces it. A rank of weight 0 contributes nothing, not even a NaN. A weight that was given
        before an earlier forward is an error in backward: its own may never come.

        Raises:
            ValueError: a weight that is negative or not finite, or something else decides what is divided by what.
        """
        for other, is_on, why in (
            ("mixed_precision", self._mixed_precision is not None, "it divides sums, all alike"),
            ("a communication hook", self._registered_hook is not None, "the hook owns the arithmetic"),
            ("delay_all_reduce_named_params", self._delayed is not None, "it divides by the number of ranks"),
            ("join", self._join_config.enable, "a rank that has run out of inputs would have to weigh, too"),
        ):
            exclude("`weigh`", {other: is_on}, why)
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
        others = {f"a communication hook (`{checked.name}`)": self._options.reduction != "mean"}
        exclude(f'`reduction` ("{self._options.reduction}")', others, "the hook owns the arithmetic")
        if self._registered_hook is not None:
            raise RuntimeError(
                f"register_comm_hook or register_builtin_comm_hook can only be called once, but "
                f"`{self._registered_hook.name}` is registered and so cannot be `{checked.name}`."
            )
        self._registered_hook = checked
        self._reducer.reducing = self._reducing()

    def _reducing(self) -> Reducing:
        """Reduces buckets over the present transport, by the communication hook if there is one."""
        reducing: Reducing
        if (hook := self._registered_hook) is None:
            reducing = self._strategies.all_reduce(self._transport)
        else:
            watch_future = getattr(self._transport, "watch_future", None)  # where waits are watched
            reducing = HookReducing(hook, self._reducer.events, watch_future)
        for extension in self.extensions:
            reducing = extension.wrap_reducing(reducing, self)
        return reducing

    # ------------------------------------------------------------------ replicas and their buffers

    def synchronize(
        self, source: int = 0, *, buffers: bool = True, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Overwrite parameters and buffers on every rank with those of rank `source`. Collective.

        With an `optimizer` also its state and hyperparameters, such as the learning rate, for instance when rank
        `source` alone has loaded a checkpoint. What counts steps elsewhere, a learning rate scheduler or a
        GradScaler, does not travel: load it on every rank.

        Raises:
            TypeError, ValueError: not an optimizer whose state is equal on all ranks.
            RuntimeError: the ranks have other parameter groups, or state that cannot be sent. On every rank.
        """
        if optimizer is not None:
            check_optimizer(optimizer)
        params = [param for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore]
        state: list[torch.Tensor] = [*params]
        if buffers:
            self._buffers_in_step.collect()
            state += self._buffers_in_step.tensors
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, state, source)
        if self._delayed is not None:
            self._delayed.broadcast(source)
            params += self._delayed.params
        if optimizer is not None:
            broadcast_optimizer_state(self._transport, self.process_group, optimizer, params, source)

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward begins or ends with a synchronisation of the buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffers_in_step.named)

    def _synchronizes_buffers(self, *, after_forward: bool) -> bool:
        hook = self._buffers_in_step.hook
        if any(extension.synchronizes_buffers for extension in self.extensions):
            return False
        return self.will_sync_module_buffers() and after_forward == (hook is not None and hook.after_forward)

    def _synchronize_buffers(self) -> None:
        """Rank 0's buffers for all; under `join`, those of the highest rank that still has inputs."""
        self._reducer.events.emit(EventKind.BUFFERS_BEGIN)
        self._reducer.futures += self._buffers_in_step.synchronize(self._transport, self._buffers_from)
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
        """Go on with the ranks of another group, however the last backward has ended.

        To be called on all its ranks between steps. Communication hooks keep the group that they know. After an
        exception, what gradients that are views hold is undefined in buckets that were under way: clear them.
        """
        exclude("`move_to_group`", {"a transport of your own": not isinstance(self._transport_kind, str)})
        self.process_group = process_group
        self._transport = self._open_transport(self._transport_kind)
        self._divisor.change_ranks(self._transport)
        self._reducer.change_ranks(self._transport, self._reducing())
        if self._delayed is not None:
            self._delayed.change_ranks(self._transport)
        for extension in self.extensions:
            extension.change_ranks(self)

    def follow(self, plan: BucketPlan) -> None:
        """Bucket by `plan` for good; see `plan_from_groups`. To be called on every rank, between steps.

        Raises:
            RuntimeError: not the same plan, of all `ddp.plan.params`, on every rank; or a backward is under way.
        """
        groups = [[slot.param for slot in bucket.slots] for bucket in plan.buckets]
        if plan.params != self.plan.params or [slot.param for slot in plan.slot_of] != [*range(len(plan.params))]:
            raise RuntimeError("A plan has each of `ddp.plan.params` in one bucket, and this one does not.")
        verify_replicas_agree(self._transport, Replica([], options={"the plan's buckets": groups}), self.device)
        self._reducer.adopt(plan)
        self._reducer.store.rebuilds = False
        self._reducer.store.await_another_order()  # and forget the one that it may have observed

    # ------------------------------------------------------------------ copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if not is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: "
                "a copy could not know which ranks to average over. Pickle `.module` instead."
            )
        if self._delayed is not None:
            raise RuntimeError("With delay_all_reduce_named_params there can be no copy. Copy `.module` instead.")
        return {name: value for name, value in self.__dict__.items() if name not in CONNECTED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect a copy to the default group; as in torch with the buffer hook, without the communication hook.

        By the process group: another transport takes all ranks to open, and this one may be alone in making a copy.
        """
        super().__setstate__(state)
        self.process_group = _get_default_group()
        self._transport_kind = "process_group"
        self._transport = self._open_transport(self._transport_kind)
        self._build_reducer()
        for extension in self.extensions:
            extension.attach(self, starts_equal=False)

    # ------------------------------------------------------------------ what can be asked

    plan = property(attrgetter("_reducer.plan"), doc="Which gradient travels in which bucket, in launch order.")
    events = property(attrgetter("_reducer.events"), doc="What happens in each step: `events.watch(sink)`.")
    device = property(attrgetter("_placement.device"))
    device_type = property(attrgetter("_placement.device.type"))
    device_ids = property(attrgetter("_placement.device_ids"))
    output_device = property(attrgetter("_placement.output_device"))
    find_unused_parameters = property(attrgetter("_options.find_unused_parameters"))
    gradient_as_bucket_view = property(attrgetter("_options.gradient_as_bucket_view"))
    static_graph = property(attrgetter("_options.static_graph"))

    @property
    def broadcast_buffers(self) -> bool:
        """The name before torch 2.13 of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value
