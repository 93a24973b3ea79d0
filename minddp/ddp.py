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
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _to_kwargs

from minddp import replicas
from minddp.comm_hooks import CommHook
from minddp.events import EventKind
from minddp.options import Options, refuse_unfinished_options
from minddp.placement import check_parameters, device_index, resolve_group
from minddp.plan import BucketPlan
from minddp.reducer import Reducer
from minddp.transport import open_transport


class DistributedDataParallel(nn.Module):
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
        device_mesh: a one-dimensional mesh instead of a process group.
        skip_all_reduce_unused_params: do not reduce buckets of unused parameters only; they must be the same
            on every rank.
        bucket_cap_mb_list: a capacity in MiB for each bucket, the last one repeating.
        batched_grad_copy: copy first and divide once per bucket; as torch, the mean is then a true division.
        forward_sync_buffers: broadcast rank 0's buffers before each forward.
        transport: how bytes travel; "process_group" is the backend of `process_group`.

    Not offered yet, and refused with `NotImplementedError`: `delay_all_reduce_named_params`,
    `param_to_hook_all_reduce`, `mixed_precision`, sparse gradients, complex parameters, modules on several
    devices, `join`.

    Attributes:
        module: the wrapped module.
        plan: the current `BucketPlan`; print it.
        require_backward_grad_sync: whether the next backward is synchronised; see `no_sync`.

    Raises:
        ValueError, TypeError: wrong arguments, or no process group.
        RuntimeError: nothing requires grad, lazy parameters, or replicas that differ (names the parameter, the
            rank and both shapes).
        NotImplementedError: see above.
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
    ):
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps an nn.Module, but got {type(module).__name__}.")
        refuse_unfinished_options(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
        )
        self._options = Options.checked(
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        _warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)
        self._transport_kind = transport
        self.process_group = resolve_group(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._place(module, device_ids, output_device)
        self.module = module
        self.dim = dim
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.forward_sync_buffers = self._options.forward_sync_buffers
        self._connect()
        if self._options.init_sync:
            self._synchronize_replicas()

    def _place(self, module: nn.Module, device_ids: Any, output_device: Any) -> None:
        """Check where the module lies and what may be asked of its devices, by torch's rules."""
        params = [p for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
        check_parameters(dict(module.named_parameters()), params)
        devices = {param.device for param in params}
        self.device = params[0].device
        self.device_type = self.device.type
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids can only be None or contain a single element, but is {list(device_ids)}: "
                f"minddp, as torch, runs one process per device."
            )
        if (device_ids or output_device) and (self.device_type == "cpu" or not device_ids):
            raise ValueError(
                f"DistributedDataParallel device_ids and output_device arguments only work with single-device "
                f"GPU modules, but got device_ids {device_ids}, output_device {output_device}, and module "
                f"parameters {devices}. Leave both out."
            )
        self.device_ids = [device_index(device) for device in device_ids] if device_ids else None
        self.output_device = None
        if device_ids:
            self.output_device = device_index(device_ids[0] if output_device is None else output_device)

    def _connect(self) -> None:
        """Transport, reducer and hooks: all that a pickle leaves behind."""
        self._transport = open_transport(self._transport_kind, self.process_group)
        self._reducer = Reducer(self._reduced_params(), self._transport, self._options)
        self._collect_buffers()

    def _synchronize_replicas(self) -> None:
        replicas.verify_replicas_agree(self._transport, self._reduced_params())
        state: list[torch.Tensor] = [
            param for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore
        ]
        if self._options.init_sync_buffers:
            state += self.modules_buffers
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, state)

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self.module(*inputs, **kwargs))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled():
            self._reducer.ensure_finished()
            self._reducer.rebuild_if_due()
        if self.will_sync_module_buffers():
            self._sync_buffers()
        return self._on_device(inputs, kwargs)

    def _post_forward(self, output: Any) -> Any:
        # Buffers are synchronised before a forward only if the forward before it was one that trains: torch's
        # rule, which keeps evaluation and accumulation free of communication.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self._reducer.arm(output)
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

    def _on_device(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.device_ids:
            return inputs, kwargs
        device = torch.device(self.device_type, self.device_ids[0])
        moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, True)
        return moved_inputs[0], moved_kwargs[0]

    # ------------------------------------------------------------------ buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with a broadcast of rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

    def _sync_buffers(self) -> None:
        self._collect_buffers()
        # Autograd must not take the overwritten buffers for modified: as torch.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            replicas.broadcast_coalesced(self._transport, self.modules_buffers)
        self._reducer.tell(EventKind.BUFFERS_BROADCAST, len(self.modules_buffers))

    def _collect_buffers(self) -> None:
        """Anew each time, since modules may assign new tensors to their buffers."""
        self.modules_buffers = [
            buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore
        ]

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

    def join(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("minddp does not support `join` (uneven inputs) yet.")

    # ------------------------------------------------------------------ copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if not _is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: "
                "a copy could not know which ranks to average over. Pickle `.module` instead."
            )
        state = copy.copy(self.__dict__)
        for connected in ("process_group", "_transport", "_reducer", "modules_buffers"):
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
