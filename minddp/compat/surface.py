"""The wrapper of `minddp.ddp` with the private surface of torch's class.

Frameworks, torch's own tests and torch.compile use names with a leading underscore, and attributes that nothing
else needs. They are kept apart from the algorithm. tests/surface lists the members of torch's class that this one
lacks, with the reasons.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from minddp import ddp as core
from minddp.compat import compiled
from minddp.compat.logger import Logger
from minddp.compat.optimizers_in_backward import take_over_optimizers
from minddp.compat.reducer_facade import ReducerFacade
from minddp.replicas import broadcast as replicas
from minddp.replicas.buffers import BufferHook
from minddp.replicas.placement import copies_on_side_stream, reduced_parameters, sparse_parameters


class DistributedDataParallel(core.DistributedDataParallel):
    __doc__ = core.DistributedDataParallel.__doc__

    _active_ddp_module: ClassVar[Any] = None  # set by code that finds this class under torch's name
    _ddp_sink_clone = False  # outputs are never cloned
    _use_python_reducer = False

    def _build_reducer(self) -> None:
        super()._build_reducer()
        self._comm_hooks: list[tuple[Callable, object]] = []
        compiled.skip_our_files()
        self._lazy_init_ran = False
        self.reducer = ReducerFacade(self, self._reducer)
        self.logger = Logger(self)
        self.reducer.set_logger(self.logger)

    def __getstate__(self) -> dict[str, Any]:
        with self._noting_errors():
            state = super().__getstate__()
        for connected in ("reducer", "logger", "_comm_hooks", "_lazy_init_ran"):
            del state[connected]
        return state

    # ------------------------------------------------------------------ forward

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.set_runtime_stats_and_log()
            self.logger.begin_iteration()
        return super()._pre_forward(*inputs, **kwargs)

    def _run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return super()._run_module(*inputs, **kwargs)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Make this the active data-parallel module for dynamo; an inner wrapper replaces it during its forward."""
        # In torch's class: setting an attribute of minddp's would invalidate Python's caches of its methods.
        before = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self  # type: ignore[assignment]
        try:
            yield
        finally:
            TorchDDP._active_ddp_module = before

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """Asked by torch.compile."""
        return cls._active_ddp_module or TorchDDP._active_ddp_module

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

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Register the Python version of a hook that torch has in C++, too; both have the same bits."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks: dict[object, Callable[..., Any]] = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        with self._noting_errors():
            if comm_hook_type not in hooks:
                listed = ", ".join(map(str, hooks))
                raise TypeError(f"A built-in hook is one of {listed}, but got {comm_hook_type!r}.")
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _lazy_init(self) -> None:
        """At the first forward, since the optimizers may be applied after construction."""
        self._lazy_init_ran = True
        take_over_optimizers(self)

    # ------------------------------------------------------------------ buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        after_forward = comm_hook_location is _BufferCommHookLocation.POST_FORWARD
        self.register_buffer_hook(state, hook, after_forward=after_forward)

    @property
    def buffer_hook(self) -> _BufferCommHook:
        """Raises `AttributeError` if none is registered."""
        hook = self._buffers_in_step.hook
        if not isinstance(hook, BufferHook):
            raise AttributeError("There is no buffer hook.")
        location = _BufferCommHookLocation["POST_FORWARD" if hook.after_forward else "PRE_FORWARD"]
        return _BufferCommHook(hook.function, hook.state, location)

    named_module_buffers = property(attrgetter("_buffers_in_step.named"))
    modules_buffers = property(attrgetter("_buffers_in_step.tensors"))
    _sync_buffers = core.DistributedDataParallel._synchronize_buffers

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        with torch.no_grad():
            replicas.broadcast_coalesced(self._transport, tensors, authoritative_rank, buffer_size)

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.logger._set_uneven_input_join()
        return super().join_hook(**kwargs)

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

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters to reduce, and whether each has a sparse gradient."""
        self._buffers_in_step.collect()
        sparse, named = sparse_parameters(self.module), reduced_parameters(self.module, self.parameters_to_ignore)
        return [param for _, param in named], [name in sparse for name, _ in named]

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
        """Continue with the ranks of another group. A rank outside of the group only resets its reducer."""
        if _rank_not_in_group(new_process_group):
            self.reducer._reset_state()
        else:
            self.move_to_group(new_process_group)

    _has_rebuilt_buckets = property(attrgetter("_reducer.store.has_rebuilt"))

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Does nothing: outputs can be modified in place without being cloned."""

    # ------------------------------------------------------------------ options

    broadcast_bucket_size = replicas.COALESCE_BYTES
    bucket_bytes_cap = property(attrgetter("_options.caps.rest_bytes"))
    batched_grad_copy = property(attrgetter("_options.batched_grad_copy"))
    lazy_bucket_allocation = property(attrgetter("_options.lazy_bucket_allocation"))
    skip_all_reduce_unused_params = property(attrgetter("_options.skip_all_reduce_unused_params"))
    use_side_stream_for_tensor_copies = property(lambda _: copies_on_side_stream())
    bucket_bytes_cap_list = property(lambda self: list(self._options.caps.each_bytes))
    is_multi_device_module = property(lambda self: len({param.device for param in self._module_parameters}) > 1)

    # ------------------------------------------------------------------ methods of torch's class that fit this one
    # They pass members of this class on to the reducer, the logger or the module.

    _log_and_throw: Any = TorchDDP._log_and_throw
    _get_ddp_logging_data: Any = TorchDDP._get_ddp_logging_data
    _set_ddp_runtime_logging_sample_rate: Any = TorchDDP._set_ddp_runtime_logging_sample_rate
    _register_fused_optim: Any = TorchDDP._register_fused_optim
    _default_broadcast_coalesced: Any = TorchDDP._default_broadcast_coalesced
    _set_params_and_buffers_to_ignore_for_model = staticmethod(TorchDDP._set_params_and_buffers_to_ignore_for_model)
    _build_debug_param_to_name_mapping: Any = TorchDDP._build_debug_param_to_name_mapping
    _check_reducer_finalized: Any = TorchDDP._check_reducer_finalized
    _remove_autograd_hooks: Any = TorchDDP._remove_autograd_hooks
    scatter: Any = TorchDDP.scatter  # for several devices in a process, like the next two
    to_kwargs: Any = TorchDDP.to_kwargs
    gather: Any = TorchDDP.gather
