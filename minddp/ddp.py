"""The wrapper: its construction, its forward, the options of backward, and its copies.

    construction    check the arguments                       options, modes/delayed, replicas/placement
                    is it the same model on every rank?       replicas/agreement
                    broadcast rank 0's weights                replicas/broadcast, replicas/buffers
                    make buckets, and hooks on parameters     strategies, core/reducer
    forward         is the module unchanged?                  replicas/module_change_check
                    drop an interrupted backward              core/reducer
                    announce the step to joined ranks         modes/join
                    rebuild the buckets in observed order     core/reducer
                    broadcast rank 0's buffers                replicas/buffers
                    move and cast the inputs                  replicas/placement, modes/mixed_precision
                    *run the module*
                    prepare for backward                      core/reducer
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

from minddp import strategies
from minddp.comm_hooks import CommHook, HookStrategy
from minddp.core.autograd import recorded
from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan
from minddp.core.reduction import ReduceStrategy
from minddp.extension import Extension
from minddp.modes.delayed import DelayedAllReduce, delayed_parameters, names_of
from minddp.modes.divisor import Divisor
from minddp.modes.join import UnevenInputs
from minddp.modes.manual_finalization import ManualFinalization
from minddp.modes.mixed_precision import MixedPrecision
from minddp.options import Options, exclude
from minddp.replicas import broadcast, placement
from minddp.replicas.agreement import Replica, are_equal_everywhere, verify_replicas_agree
from minddp.replicas.buffers import Buffers
from minddp.replicas.module_change_check import ModuleChangeCheck
from minddp.transport import open_transport
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.protocols import Transport

#: Attributes that are not pickled: they belong to this process and its group.
CONNECTED = (
    "process_group",
    "_transport",
    "_divisor",
    "_mixed_precision",
    "_reducer",
    "_registered_hook",
    "_module_change_check",
)


class DistributedDataParallel(nn.Module, ManualFinalization, UnevenInputs):
    """Data parallelism for one module: every rank's `.grad` is the mean over the ranks when backward returns.

    A drop-in for torch 2.15's, with the same results to the bit. minddp's own parameters are keyword-only.

    Args:
        module: the module to wrap; at least one parameter must require grad.
        device_ids: at most one device, for a module on a GPU: inputs are moved there.
        output_device, dim: as torch; only stored.
        broadcast_buffers: deprecated; False also omits the buffers from the broadcast at construction.
        init_sync: verify that replicas agree and broadcast rank 0's parameters and buffers.
        process_group: the ranks to average over; the default group if None.
        bucket_cap_mb: capacity of a bucket in MiB; by default 25, and the first 1.
        find_unused_parameters: a backward may leave parameters out, and different ones on different ranks.
        check_reduction: deprecated; has no effect, as in torch.
        gradient_as_bucket_view: `.grad` shares memory with the buckets.
        static_graph: the same parameters are used in the same way in every iteration.
        delay_all_reduce_named_params: (name, parameter) pairs with one late all-reduce; see `modes/delayed.py`.
        param_to_hook_all_reduce: the parameter whose gradient triggers that all-reduce.
        mixed_precision: torch's `_MixedPrecision`: dtypes to compute and reduce in; see `modes/mixed_precision.py`.
        device_mesh: a 1D mesh instead of a process group; cut from a larger one, the rest may be tensor parallel.
        skip_all_reduce_unused_params: do not reduce buckets whose parameters are all unused, on every rank.
        bucket_cap_mb_list: a capacity in MiB for each bucket, the last one repeating.
        batched_grad_copy: copy first and divide once per bucket; as torch, the mean is then a true division.
        forward_sync_buffers: broadcast rank 0's buffers before each forward.
        lazy_bucket_allocation: buckets have memory during backward only; as torch 2.15. See `core/bucket_store.py`.
        transport: a name that `transport.open_transport` takes, see docs/hosts.md; or a `Transport` of your own.
        first_bucket_cap_mb: capacity of the first bucket alone, in MiB.
        extensions: tools that attach to this wrapper; see `extension.py`.

    Attributes:
        require_backward_grad_sync: True if the next backward is synchronised; see `no_sync`.

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
        trigger = param_to_hook_all_reduce
        delayed = delayed_parameters(module, delay_all_reduce_named_params, trigger, self._options, mixed_precision)
        self.process_group = placement.resolve_group(process_group, device_mesh, module)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = {*ignored, *names_of(module, delayed.values())}
        placement.check_module(module, self.parameters_to_ignore, delayed.values())
        self._placement = placement.Placement.checked(module, self.parameters_to_ignore, device_ids, output_device)
        self.module, self.dim = module, dim
        self.device_mesh, self.mixed_precision = device_mesh, mixed_precision
        self.forward_sync_buffers = self._options.forward_sync_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._transport_kind = transport
        self._synchronize_replicas(delayed, trigger)
        self._build_reducer()
        for extension in self.extensions:
            extension.attach(self, starts_equal=self._options.init_sync)
        if self._mixed_precision is not None:
            self._mixed_precision.cast_buffers(module, self.parameters_to_ignore)

    def _synchronize_replicas(self, delayed: dict[str, nn.Parameter], trigger: Any) -> None:
        """Check that all ranks have the same model, and broadcast rank 0's weights."""
        init_sync, kind = self._options.init_sync, self._transport_kind
        self._transport = self._open_transport("process_group" if isinstance(kind, str) else kind)
        self._buffers_in_step = Buffers(self.module, self.parameters_to_ignore)
        if init_sync:
            self._verify_that_ranks_agree(kind, delayed)
        if isinstance(kind, str) and kind != "process_group" and (init_sync or kind != "auto"):
            self._transport = self._open_transport(kind)  # collective, as is init_sync
        self._delayed = DelayedAllReduce(delayed, trigger, self._transport) if delayed else None
        if init_sync:  # before the buckets are made: both take as much memory as the parameters
            self.synchronize(buffers=self._options.init_sync_buffers)
        elif self._delayed is not None:  # as torch, whatever init_sync says
            broadcast.broadcast_coalesced(self._transport, [param.detach() for param in self._delayed.params])

    def _build_reducer(self) -> None:
        """Make the reducer and its hooks. With the transport, these are not pickled."""
        ignored, sparse = self.parameters_to_ignore, placement.sparse_parameters(self.module)
        self._registered_hook: CommHook | None = None
        self._divisor = Divisor(self._transport)
        config = self.mixed_precision
        self._mixed_precision = None if config is None else MixedPrecision(config, self.module, ignored, sparse)
        reduced = placement.reduced_parameters(self.module, ignored)
        parts = self._transport, self._divisor.for_this_backward, self._mixed_precision
        self._reducer = strategies.make_reducer(self._options, reduced, sparse, *parts)
        self._reducer.modes.append(self._divisor)
        if self._delayed is not None and self._delayed.has_trigger_in(self._reducer.params):
            self._reducer.modes.append(self._delayed)
        named = self.module.named_parameters(remove_duplicate=False)
        known = [*self._reducer.params, *(param for name, param in named if name in ignored)]
        self._module_change_check = ModuleChangeCheck(self.module, known, ignored)

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
            self._module_change_check.check(self.module)
            self._reducer.ensure_finished()
        self._announce_to_joined_ranks()
        if torch.is_grad_enabled():
            self._reducer.rebuild_if_due()
        if self._synchronizes_buffers(after_forward=False):
            self._synchronize_buffers()
        inputs, kwargs = self._placement.move(inputs, kwargs)
        if torch.is_grad_enabled():
            for extension in self.extensions:
                extension.before_module(self, inputs, kwargs)
        if self._mixed_precision is not None:
            return self._mixed_precision.begin_forward(inputs, kwargs, self._reducer.hooks.renew)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if self._synchronizes_buffers(after_forward=True):
            self._synchronize_buffers()
        # Torch's rule: buffers are synchronised after a forward that trains, not in evaluation or accumulation.
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises != self.require_forward_param_sync:  # setting an attribute of a module is slow
            self.require_forward_param_sync = synchronises
        if torch.is_grad_enabled():
            for extension in self.extensions:
                extension.post_forward(self)
            if synchronises:
                self._reducer.prepare_for_backward(output)
            else:
                self._reducer.skip_sync(output)
        if self._mixed_precision is not None:
            self._mixed_precision.end_forward(output)
        if self._delayed is not None:
            self._delayed.provide_grads()
        self._reducer.events.emit(EventKind.FORWARD_END)
        return output

    # ------------------------------------------------------------------ options of backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate locally; the next synchronised backward reduces their sum.

        The forward must be inside the context, too: it decides if its backward is synchronised.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weigh(self, weight: float) -> None:
        """Weight this rank's gradients in the next backward by `weight`, such as its number of samples.

        Call it at the same place on every rank, before or after the forward: it waits for the sum over the ranks.
        Between two forwards it applies to the second. Gradients accumulated under `no_sync` get the weight of the
        backward that reduces them. A rank of weight 0 contributes nothing, not even a NaN. A weight given before an
        earlier forward is an error in backward.

        Raises:
            ValueError: a weight that is negative or not finite, or an option that divides in another way.
            RuntimeError: all weights are zero.
        """
        others = {
            "mixed_precision": self._mixed_precision is not None,
            "a communication hook": self._registered_hook is not None,
            "delay_all_reduce_named_params": self._delayed is not None,
            "join": self._join_config.enable,
        }
        exclude("`weigh`", others, "it decides the divisor itself")
        self._divisor.weigh(weight, self.device)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket, and divide. It returns a future of the bucket's new tensor.

        Raises:
            TypeError, ValueError: the hook has the wrong signature.
            RuntimeError: a hook is registered, mixed_precision is on, or the next backward has a weight.
        """
        if self._mixed_precision is not None:
            raise RuntimeError(
                "register_comm_hook and `mixed_precision` exclude each other: a hook may step an optimizer, but "
                "during backward parameters are low-precision copies. Compute under torch.autocast instead."
            )
        checked = CommHook.checked(state, hook)
        self._divisor.require_no_weight()
        if self._registered_hook is not None:
            raise RuntimeError(
                f"register_comm_hook or register_builtin_comm_hook can only be called once, but "
                f"`{self._registered_hook.name}` is registered and so cannot be `{checked.name}`."
            )
        self._registered_hook = checked
        self._reducer.reduce_strategy = self._reduce_strategy()

    def _reduce_strategy(self) -> ReduceStrategy:
        """The strategy for the current transport: the communication hook if there is one."""
        if self._registered_hook is None:
            return strategies.all_reduce(self._options, self._transport, self._divisor.for_this_backward)
        watch_future = getattr(self._transport, "watch_future", None)  # where waits are watched
        return HookStrategy(self._registered_hook, self._reducer.events, watch_future)

    # ------------------------------------------------------------------ changes after construction

    def become_static(self) -> None:
        """Behave as if constructed with static_graph=True. Only before training begins."""
        with self._reducer.events.reporting():
            if self._reducer.num_passes or self._reducer.phase is not Phase.IDLE:
                raise RuntimeError(
                    "set_static_graph() should be called before training loop starts and after "
                    "DistributedDataParallel is constructed. Pass static_graph=True to the constructor."
                )
        self._options = replace(self._options, static_graph=True)
        self._reducer.expect(strategies.usage_tracker(self._options, self._reducer.hooks))

    def move_to_group(self, process_group: dist.ProcessGroup) -> None:
        """Continue with the ranks of another group, even after an interrupted backward.

        Call it on all its ranks, between steps. A communication hook keeps the group in its state. After an
        exception, gradients that are views of buckets in flight have undefined values: clear them.
        """
        exclude("`move_to_group`", {"a transport of your own": not isinstance(self._transport_kind, str)})
        self.process_group = process_group
        self._transport = self._open_transport(self._transport_kind)
        self._divisor.change_ranks(self._transport)
        self._reducer.change_ranks(self._transport, self._reduce_strategy())
        state = self.plan, self._reducer.store.strides, self._reducer.usage_tracker.order_is_provisional
        if not are_equal_everywhere(self._transport, state, self.device):
            # A rank has left before the others had rebuilt their buckets, or had recorded a static graph.
            self._reducer.store.restart(self._transport)
            self._reducer.expect(strategies.usage_tracker(self._options, self._reducer.hooks))
        if self._delayed is not None:
            self._delayed.change_ranks(self._transport)
        for extension in self.extensions:
            extension.change_ranks(self)

    def follow(self, plan: BucketPlan) -> None:
        """Use the buckets of `plan` from now on, see `plan_from_groups`. Call it on every rank, between steps.

        Raises:
            RuntimeError: not the same plan of all `ddp.plan.params` on every rank, or a backward is running.
        """
        groups = [[slot.param for slot in bucket.slots] for bucket in plan.buckets]
        if plan.params != self.plan.params or [slot.param for slot in plan.slot_of] != [*range(len(plan.params))]:
            raise RuntimeError("A plan has each of `ddp.plan.params` in one bucket, and this one does not.")
        verify_replicas_agree(self._transport, Replica([], options={"the plan's buckets": groups}), self.device)
        self._reducer.adopt(plan)
        self._reducer.store.keep_plan()

    # ------------------------------------------------------------------ copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if not (dist.is_initialized() and self.process_group == _get_default_group()):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: "
                "a copy could not know which ranks to average over. Pickle `.module` instead."
            )
        if self._delayed is not None:
            raise RuntimeError("With delay_all_reduce_named_params there can be no copy. Copy `.module` instead.")
        state = {name: value for name, value in self.__dict__.items() if name not in CONNECTED}
        return {**state, "_finalizes_at_end": self._reducer.finalizes_at_end}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect a copy to the default group. As in torch it keeps the buffer hook, not the communication hook.

        One rank may copy alone, so a copy uses the process group, and the store counts copies apart.
        """
        super().__setstate__(state)
        self.process_group = _get_default_group()
        self._transport_kind = "process_group"
        self._transport = self._open_transport(ProcessGroupTransport(self.process_group, "minddp/copies"))
        self._build_reducer()
        self._reducer.finalizes_at_end = self.__dict__.pop("_finalizes_at_end", True)
        for extension in self.extensions:
            extension.attach(self, starts_equal=False)

    # ------------------------------------------------------------------ read-only attributes

    plan = property(attrgetter("_reducer.store.plan"), doc="The current `BucketPlan`; print it.")
    events = property(attrgetter("_reducer.events"), doc="What happens in each step: `events.watch(sink)`.")
    device = property(attrgetter("_placement.device"))
    device_type = property(attrgetter("_placement.device.type"))
    device_ids = property(attrgetter("_placement.device_ids"))
    output_device = property(attrgetter("_placement.output_device"))
    find_unused_parameters = property(attrgetter("_options.find_unused_parameters"))
    gradient_as_bucket_view = property(attrgetter("_options.gradient_as_bucket_view"))
    static_graph = property(attrgetter("_options.static_graph"))
