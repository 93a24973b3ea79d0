"""The public wrapper: what happens around forward, in what order. The reducer does the rest.

Torch's `DistributedDataParallel` is the model for everything visible here: the constructor's parameters, their
order and defaults, the attributes, the errors. `torch/nn/parallel/distributed.py` is the source behind each
"as torch" below.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.distributed_c10d import _get_default_group

from minddp import replicas
from minddp.buffers import BufferHook, Buffers
from minddp.comm_hooks import CommHook
from minddp.delayed import DelayedAllReduce
from minddp.events import EventKind
from minddp.join import Shadow, highest_rank, somebody_synchronises
from minddp.options import Options
from minddp.placement import Placement, check_module, resolve_group, sparse_parameters
from minddp.plan import BucketPlan
from minddp.reducer import Reducer
from minddp.transport import open_transport


class DistributedDataParallel(nn.Module, Joinable):
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
        bucket_cap_mb: capacity of a bucket in MiB. By default 25, and 1 for the first bucket.
        find_unused_parameters: parameters may go without gradient, and other ones on other ranks.
        check_reduction: deprecated; has no effect, as in torch.
        gradient_as_bucket_view: `.grad` shares memory with the buckets.
        static_graph: the same parameters are used in the same way in every iteration.
        delay_all_reduce_named_params: (name, parameter) pairs whose all-reduce waits for the gradient of
            `param_to_hook_all_reduce`; see `delayed.py`.
        param_to_hook_all_reduce: see there.
        mixed_precision: torch's `_MixedPrecision`: dtypes in which to compute and to reduce.
        device_mesh: a one-dimensional mesh instead of a process group. Cut from a larger mesh, the other
            dimensions may be tensor parallelism.
        skip_all_reduce_unused_params: do not reduce buckets of unused parameters only; they must be the same
            on every rank.
        bucket_cap_mb_list: a capacity in MiB for each bucket, the last one repeating.
        batched_grad_copy: copy first and divide once per bucket; as torch, the mean is then a true division.
        forward_sync_buffers: broadcast rank 0's buffers before each forward.
        transport: how bytes travel; "process_group" is the backend of `process_group`.
        first_bucket_cap_mb: capacity of the first bucket alone, in MiB.
        reduction: "mean" over the ranks, or "sum". For a mean weighted by rank see `weigh`.

    Attributes:
        module: the wrapped module.
        plan: the current `BucketPlan`; print it.
        require_backward_grad_sync: whether the next backward is synchronised; see `no_sync`.

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
        *,
        transport: str = "process_group",
        first_bucket_cap_mb: float | None = None,
        reduction: str = "mean",
    ):
        super().__init__()
        Joinable.__init__(self)
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
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        _warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)
        delayed = _checked_delay(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._transport_kind = transport
        self.process_group = resolve_group(process_group, device_mesh, module)
        self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ())) | set(delayed)
        check_module(module, self.parameters_to_ignore, delayed.values())
        self._placement = Placement.checked(module, self.parameters_to_ignore, device_ids, output_device)
        self.module = module
        self.dim = dim
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.forward_sync_buffers = self._options.forward_sync_buffers
        self._authoritative_rank = 0
        if mixed_precision is not None:
            raise NotImplementedError("minddp does not support `mixed_precision` yet.")
        self._connect()
        self._delayed: DelayedAllReduce | None = None
        if delayed:
            self._delayed = DelayedAllReduce(list(delayed.values()), param_to_hook_all_reduce, self._transport)
        if self._options.init_sync:
            if self._reducer.params:
                replicas.verify_replicas_agree(self._transport, self._reduced_params())
            self.synchronize(buffers=self._options.init_sync_buffers)

    def _connect(self) -> None:
        """Transport, reducer and hooks: all that a pickle leaves behind."""
        self._transport = open_transport(self._transport_kind, self.process_group)
        self._reducer = Reducer(
            self._reduced_params(), self._transport, self._options, sparse_parameters(self.module)
        )
        self._buffers_in_step = Buffers(self.module, self.parameters_to_ignore)

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_module(*inputs, **kwargs))

    def _run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._reducer.tell(EventKind.FORWARD_BEGIN)
        if torch.is_grad_enabled():
            self._reducer.ensure_finished()
        self._tell_joined_ranks_of_forward()
        if torch.is_grad_enabled():
            self._reducer.rebuild_if_due()
        if self._synchronizes_buffers(after_forward=False):
            self._synchronize_buffers()
        if self._join_config.enable:
            somebody_synchronises(self._transport, self.device, ours=self.require_backward_grad_sync)
        return self._placement.move(inputs, kwargs)

    def _post_forward(self, output: Any) -> Any:
        if self._synchronizes_buffers(after_forward=True):
            self._synchronize_buffers()
        # Buffers are synchronised before a forward only if the forward before it was one that trains: torch's
        # rule, which keeps evaluation and accumulation free of communication.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self._reducer.arm(output)
        if self._delayed is not None:
            self._delayed.provide_grads()
        self._reducer.tell(EventKind.FORWARD_END)
        return output

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

    def weigh(self, weight: float) -> None:
        """Let the next backward take the mean weighted by each rank's `weight`, such as its number of samples.

        To be called on every rank, before or after the forward. Its sum over the ranks travels meanwhile.
        """
        self._reducer.divisor.weigh(weight, self.device)

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

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins or ends with a synchronisation of the buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffers_in_step.named)

    def _synchronizes_buffers(self, *, after_forward: bool) -> bool:
        hook = self._buffers_in_step.hook
        return self.will_sync_module_buffers() and after_forward == (hook is not None and hook.after_forward)

    def _synchronize_buffers(self, *, still_active: bool = True) -> None:
        """Rank 0's buffers for all; under `join`, those of the highest rank that still has inputs."""
        source = 0
        if self._join_config.enable:
            source = highest_rank(self._transport, self.device, ours=still_active)
        self._reducer.at_end += self._buffers_in_step.synchronize(self._transport, source)
        self._reducer.tell(EventKind.BUFFERS_BROADCAST, len(self._buffers_in_step.named))

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

    @property
    def broadcast_buffers(self) -> bool:
        """The name before torch 2.13 of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # ------------------------------------------------------------------ what can be asked and changed

    @property
    def plan(self) -> BucketPlan:
        """Which gradient travels in which bucket, and in which order they leave."""
        return self._reducer.plan

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

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket; it returns a future of the bucket's new tensor.

        Nothing is divided by the world size then: the hook owns the arithmetic.

        Raises:
            TypeError, ValueError: the hook does not fit.
            RuntimeError: a hook is registered already.
        """
        checked = CommHook.checked(state, hook)
        if self._reducer.comm_hook is not None:
            raise RuntimeError(
                f"register_comm_hook or register_builtin_comm_hook can only be called once, but "
                f"`{self._reducer.comm_hook.name}` is registered and so cannot be `{checked.name}`."
            )
        self._reducer.comm_hook = checked

    def become_static(self) -> None:
        """From now on as if constructed with static_graph=True; only before training begins."""
        self._reducer.become_static()
        self._options = self._reducer.options

    def move_to_group(self, process_group: dist.ProcessGroup) -> None:
        """Go on with the ranks of another group, whatever has become of the last backward.

        To be called on all its ranks between steps. Communication hooks keep the group that they know.
        """
        self.process_group = process_group
        self._transport = open_transport(self._transport_kind, process_group)
        self._reducer.move_to(self._transport)

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for a training loop in which ranks run out of inputs at different times. See `join.py`.

        Args:
            divide_by_initial_world_size: every sample counts the same; else gradients are averaged over the
                ranks that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: all ranks raise `RuntimeError` when the first one runs out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `Join` calls on a rank that has run out of inputs.

        Raises:
            ValueError: combined with skip_all_reduce_unused_params: a shadow cannot know what is unused.
        """
        if self._options.skip_all_reduce_unused_params:
            raise ValueError(
                "`join` and `skip_all_reduce_unused_params` exclude each other: a rank that has run out of inputs "
                "cannot know which buckets the others skip."
            )
        self._divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _tell_joined_ranks_of_forward(self) -> None:
        announced = Join.notify_join_context(self)
        if announced is not None and not self._divides_by_initial_world_size:
            self._reducer.divisor.divide_by_active_ranks(announced.get_future())

    # ------------------------------------------------------------------ copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if not _is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: "
                "a copy could not know which ranks to average over. Pickle `.module` instead."
            )
        state = copy.copy(self.__dict__)
        for connected in ("process_group", "_transport", "_reducer", "_buffers_in_step"):
            del state[connected]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is connected to the default group; as in torch, without the communication hook."""
        super().__setstate__(state)
        self.process_group = _get_default_group()
        self._connect()

    # ------------------------------------------------------------------ parameters

    def _reduced_params(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters to reduce: those that require grad, in registration order, tied ones once."""
        return [
            (name, param)
            for name, param in self.module.named_parameters()
            if param.requires_grad and name not in self.parameters_to_ignore
        ]


def _checked_delay(
    named_params: Sequence[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> dict[str, nn.Parameter]:
    if (named_params is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: the "
            "gradient of the one lets those of the others leave."
        )
    return dict(named_params or ())


def _is_default_group(group: dist.ProcessGroup) -> bool:
    return dist.is_initialized() and group == _get_default_group()


def _warn_of_deprecated(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, check_reduction: bool
) -> None:
    if broadcast_buffers is not None:
        rest = (
            "its value is ignored, since `forward_sync_buffers` is given too."
            if forward_sync_buffers is not None
            else "use `forward_sync_buffers`, which unlike it keeps the broadcast of buffers at construction."
        )
        warnings.warn(f"`broadcast_buffers` is deprecated: {rest}", FutureWarning, stacklevel=3)
    if check_reduction:
        warnings.warn("`check_reduction` is deprecated and has no effect.", FutureWarning, stacklevel=3)
