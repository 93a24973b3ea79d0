"""The wrapper that `minddp` exports: `minddp.ddp` with the private surface of torch's class.

Frameworks, torch's own tests and torch.compile use names that begin with an underscore, and attributes that mean
something only to them. They are not needed to learn how data parallelism works, so they are here. What torch's
class has and this one deliberately lacks is listed, with reasons, in tests/surface.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.utils.hooks import RemovableHandle

from minddp import ddp as core
from minddp.comm_hooks import CommHook
from minddp.compat import compiled
from minddp.compat.builtin_hooks import apply_optim_in_backward_hook, builtin_hook
from minddp.compat.logger import Logger
from minddp.compat.reducer_facade import ReducerFacade
from minddp.modes.join import Shadow, announce_step, receive_step
from minddp.replicas import broadcast as replicas
from minddp.replicas.buffers import BufferHook
from minddp.replicas.placement import is_default_group, sparse_parameters


class _ActiveModule:
    """The module whose forward is running, or `None`. Torch's class remembers it; see `compiled.active`."""

    def __get__(self, instance: object, owner: type) -> Any:
        return TorchDDP._active_ddp_module


class DistributedDataParallel(core.DistributedDataParallel):
    __doc__ = core.DistributedDataParallel.__doc__

    _active_ddp_module: ClassVar[Any] = _ActiveModule()

    _ddp_sink_clone = False  # outputs are never cloned: nothing is wrapped around them

    def _connect(self) -> None:
        super()._connect()
        self._comm_hooks: list[tuple[Callable, object]] = []
        self._use_python_reducer = compiled.python_reducer_is_wanted()
        self._accum_grad_hooks: list[RemovableHandle] = []
        if self._use_python_reducer:
            compiled.take_over(self)
        else:
            compiled.keep_dynamo_out()
        self._lazy_init_ran = False
        self.reducer = ReducerFacade(self, self._reducer)
        self.logger = Logger(self)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.forward_sync_buffers,
            any(isinstance(child, nn.SyncBatchNorm) for child in self.module.modules()),
            self.static_graph,
        )

    def __getstate__(self) -> dict[str, Any]:
        with self._noting_errors():
            state = super().__getstate__()
        for connected in ("reducer", "logger", "_comm_hooks", "_lazy_init_ran", "_accum_grad_hooks"):
            del state[connected]
        return state

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs) if self._use_python_reducer else super().forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        return output if self._use_python_reducer else super()._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._use_python_reducer:
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.set_runtime_stats_and_log()
            self.logger.begin_iteration()
        return super()._pre_forward(*inputs, **kwargs)

    def _run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return super()._run_module(*inputs, **kwargs)

    _run_ddp_forward = _run_module

    def _inside_ddp_forward(self) -> AbstractContextManager[None]:
        return compiled.active(self)

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """What torch.compile splits graphs by. Some set it on the class that they find under torch's name."""
        return cls._active_ddp_module or TorchDDP._active_ddp_module

    # ------------------------------------------------------------------ logging data and errors

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        data = self.logger._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Sample one iteration in `sample_rate`, besides the first ten."""
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                f"DDP runtime logging sample rate should be equal or greater than 1, but is {sample_rate}.",
            )
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        with self._noting_errors():
            raise err_type(err_msg)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise

    # ------------------------------------------------------------------ communication hooks

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        with self._noting_errors():
            super().register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _check_comm_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        with self._noting_errors():
            CommHook.checked(None, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        with self._noting_errors():
            super().register_comm_hook(self.process_group, builtin_hook(comm_hook_type))
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[torch.Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Step an optimizer for each bucket as soon as it is reduced. Replaces any communication hook."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        overlapped: Any = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP.") from error

    def _lazy_init(self) -> None:
        """At the first forward: the user may have registered things until then."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _setup_in_backward_optimizers(self) -> None:
        """Optimizers of `_apply_optimizer_in_backward` shall step after the reduction, not before."""
        params = self._module_parameters
        if not any(hasattr(param, "_in_backward_optimizers") for param in params):
            return
        from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
        from torch.distributed.optim import apply_optimizer_in_backward

        handles: Mapping[Any, Any] = apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for param in params:
            for handle in handles.get(param, ()):
                handle.remove()
        hook: Callable[..., Any] = apply_optim_in_backward_hook
        if self.device_type != "cpu":
            hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)

    # ------------------------------------------------------------------ buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.register_buffer_hook(
            state, hook, after_forward=comm_hook_location is _BufferCommHookLocation.POST_FORWARD
        )

    @property
    def buffer_hook(self) -> _BufferCommHook:
        """
        Raises:
            AttributeError: none is registered.
        """
        hook = self._buffers_in_step.hook
        if not isinstance(hook, BufferHook):
            raise AttributeError("There is no buffer hook.")
        location = _BufferCommHookLocation
        return _BufferCommHook(
            hook.function, hook.state, location.POST_FORWARD if hook.after_forward else location.PRE_FORWARD
        )

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        return self._buffers_in_step.named

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        return self._buffers_in_step.tensors

    def _assign_modules_buffers(self) -> None:
        self._buffers_in_step.collect()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._synchronizes_buffers(after_forward=False)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._synchronizes_buffers(after_forward=True)

    def _sync_buffers(self) -> None:
        self._synchronize_buffers()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self._reducer.backward_end.futures += self._buffers_in_step.synchronize(self._transport, authoritative_rank)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, tensors, authoritative_rank, buffer_size)

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.logger._set_uneven_input_join()
        return super().join_hook(**kwargs)

    def _check_and_sync_module_buffers(self) -> None:
        if self._check_sync_bufs_pre_fwd():
            self._synchronize_buffers()

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        if is_joined_rank:
            return receive_step(self._transport, self.device).is_synchronised
        announce_step(self._transport, self.device, trains=True, is_synchronised=self.require_backward_grad_sync)
        return None

    def _match_all_reduce_for_bwd_pass(self) -> None:
        buckets = self.reducer._get_zeros_like_grad_buckets()
        for future in [self.reducer._run_comm_hook(bucket) for bucket in buckets]:
            future.wait()

    def _match_unused_params_allreduce(self) -> None:
        used = self.reducer._get_local_used_map()
        assert used is not None, "the other ranks find unused parameters, so this one does"
        self._transport.all_reduce(torch.zeros_like(used)).wait()

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        Shadow(self).post_hook(is_last_joiner)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest `input_rank` of the ranks for which `rank_cond` holds. Collective."""
        rank = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        if rank.item() == -1:
            self._log_and_throw(ValueError, "Expected rank_cond to be true for at least one process.")
        return int(rank.item())

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    # ------------------------------------------------------------------ parameters and their names

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        """All parameters but the ignored ones."""
        ignored = self.parameters_to_ignore
        return [param for name, param in self.module.named_parameters() if name not in ignored]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """All parameters but those marked by `_set_params_and_buffers_to_ignore_for_model`, or pairs with names."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Let wrappers yet to be built leave out the parameters and buffers of these names."""
        cast(Any, module)._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                cast(Any, tensor)._ddp_ignored = True

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters to reduce, and whether each has a sparse gradient."""
        self._assign_modules_buffers()
        sparse, named = sparse_parameters(self.module), self._reduced_params()
        return [param for _, param in named], [name in sparse for name, _ in named]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """Index in `parameters` -> name.

        Raises:
            ValueError: `parameters` are not those to reduce.
        """
        index = {param: place for place, param in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, param in self._reduced_params():
            if param not in index:
                self._log_and_throw(
                    ValueError, f"Param with name {name} found in module parameters, but not DDP parameters."
                )
            names[index[param]] = name
        if len(index) != len(names):
            self._log_and_throw(
                ValueError,
                f"Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(index)} vs {len(names)}.",
            )
        return names

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        return [] if self._delayed is None else self._delayed._params

    @property
    def _delay_grad_buffer(self) -> torch.Tensor | None:
        return None if self._delayed is None else self._delayed._buffer

    @property
    def _delay_grad_views(self) -> list[torch.Tensor]:
        return [] if self._delayed is None else self._delayed._views

    @property
    def _delay_all_reduce_all_params(self) -> bool:
        return not self._reducer.params

    def _clear_grad_buffer(self) -> None:
        if self._delayed is not None:
            self._delayed.provide_grads()

    # ------------------------------------------------------------------ changed after construction

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self.become_static()
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will "
                "detect unused parameters automatically: leave it out, and see that they stay the same.",
                stacklevel=2,
            )

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with the ranks of another group; a rank that is not among them only forgets its last backward."""
        if _rank_not_in_group(new_process_group):
            self.reducer._reset_state()
        else:
            self.move_to_group(new_process_group)

    def move_to_group(self, process_group: dist.ProcessGroup) -> None:
        super().move_to_group(process_group)
        self.logger.set_group(process_group)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._reducer.store.has_rebuilt

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: outputs can be modified in place although they are not cloned."""

    def _check_default_group(self) -> None:
        """Raise `RuntimeError` if this wrapper cannot be pickled."""
        if not is_default_group(self.process_group):
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group.",
            )

    # ------------------------------------------------------------------ what it was constructed with

    @property
    def bucket_bytes_cap(self) -> int:
        return self._options.caps.rest_bytes

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        return list(self._options.caps.each_bytes)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """True if the first bucket is smaller, as it is by default."""
        return self._options.caps.first_bytes < self._options.caps.rest_bytes

    @property
    def broadcast_bucket_size(self) -> int:
        return replicas.COALESCE_BYTES

    @property
    def is_multi_device_module(self) -> bool:
        return len({param.device for param in self._module_parameters}) > 1

    @property
    def batched_grad_copy(self) -> bool:
        return self._options.batched_grad_copy

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        return self._options.skip_all_reduce_unused_params

    @property
    def use_side_stream_for_tensor_copies(self) -> bool:
        return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"

    # ------------------------------------------------------------------ from when a process had several devices

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: int) -> Any:
        return gather(outputs, output_device, dim=self.dim)
