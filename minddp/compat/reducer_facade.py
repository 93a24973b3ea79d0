"""`ddp.reducer`: the methods of torch's `dist.Reducer`, for code that reaches into it.

They do: Accelerate and Lightning call `prepare_for_backward` and `_rebuild_buckets`, torch's pipelining too, its
communication hooks call `_run_allreduce_hook`, its tests `_get_local_used_map`. Names and meanings are torch's
(`torch/csrc/distributed/c10d/reducer.cpp`); minddp's own reducer does the work and does not use them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minddp.comm_hooks import GradBucket, HookReducing
from minddp.core.reducer import Reducer
from minddp.transport.protocols import Work


class ReducerFacade:
    """Belongs to one wrapper, which it refers to weakly."""

    def __init__(self, ddp: Any, reducer: Reducer):
        self._ddp = weakref.proxy(ddp)
        self._reducer = reducer

    # ------------------------------------------------------------------ around forward and backward

    def prepare_for_forward(self) -> None:
        """Count an iteration, and sample it if its turn has come."""
        self._ddp.logger.begin_iteration()

    def prepare_for_backward(self, outputs: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Let the next backward be synchronised, such as one whose forward ran under `no_sync`.

        Raises:
            RuntimeError: the last backward has not brought all gradients. (Torch starts anew and keeps silent.)
        """
        self._reducer.ensure_finished()
        self._reducer.arm(outputs, finalize_at_end=not self._ddp.require_manual_backward_finalization)

    def _rebuild_buckets(self) -> bool:
        self._reducer.ensure_finished()
        return self._reducer.rebuild_if_due()

    def _delay_all_reduce(self) -> None:
        """Reduce the first backward of a static graph, if that has not happened when it ended."""
        self._reducer.reduce_recorded()

    def _autograd_hook(self, index: int) -> None:
        """As if the gradient of parameter `index` had been accumulated; to be called during backward."""
        self._reducer.hooks.handler(index)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future]) -> None:
        self._reducer.backward_end.futures += futures

    def _check_reducer_finalized(self) -> None:
        """Raise `RuntimeError` unless the last backward has brought all gradients."""
        self._reducer.ensure_finished()

    def get_backward_stats(self) -> list[int]:
        """Per parameter, how many nanoseconds after forward it was ready: of the iteration that is being sampled.

        0 where it was not, and all 0 if this iteration is none of those that are sampled. (Torch times them all.)
        """
        sampled = self._ddp.logger.sampled
        ready_ns = {} if sampled is None else sampled.param_ready_ns
        return [ready_ns.get(param, 0) for param in range(len(self._reducer.params))]

    # ------------------------------------------------------------------ communication

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """The buckets in launch order, but with zeros: what a rank without inputs contributes."""
        buckets = self._reducer.buckets
        return [
            GradBucket(bucket, is_last=bucket is buckets[-1], instead=torch.zeros_like(bucket.wire))
            for bucket in buckets
        ]

    def _run_comm_hook(self, bucket: GradBucket) -> torch._C.Future:
        """Reduce by the registered communication hook, or else by `_run_allreduce_hook`."""
        reducing = self._reducer.reducing
        return (
            reducing.hook.launch(bucket) if isinstance(reducing, HookReducing) else self._run_allreduce_hook(bucket)
        )

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch._C.Future:
        """The sum over the ranks, in place of the bucket's buffer; the future holds it as a list of one."""
        return _future_of(self._reducer.transport.all_reduce(bucket.buffer()), bucket.buffer())

    def _get_local_used_map(self) -> torch.Tensor | None:
        """How many ranks used each parameter in the last backward, int32; `None` where that is not counted."""
        usage = getattr(self._reducer.expectation, "usage", None)
        return None if usage is None else usage.sums

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        """Under `join`, `work` counts the ranks that still have inputs: divide by them, or by all ranks."""
        if not use_static_world_size:
            self._ddp._divisor.divide_by_active_ranks(work.get_future())

    def _push_all_rebuilt_params(self) -> None:
        """Take any order for that of the first backward, which this rank has not seen; rank 0's will be used."""
        if self._reducer.awaits_order:
            self._reducer.store.observe(list(range(len(self._reducer.params))))

    # ------------------------------------------------------------------ changed after construction

    def _set_static_graph(self) -> None:
        self._ddp.become_static()

    def _ddp_graph_static(self) -> bool:
        """True if every backward so far has left the same parameters unused."""
        return self._ddp.logger.graph_is_static

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._ddp.logger.sample_rate = sample_rate

    def set_logger(self, logger: dist.Logger) -> None:
        """Where to note errors."""
        self._reducer.events.on_error = lambda error: logger.set_error_and_log(str(error))

    def _remove_autograd_hooks(self) -> None:
        self._reducer.hooks.remove()

    def _reset_state(self) -> None:
        """Forget the last backward, whatever has become of it, and the order of the first."""
        self._reducer.change_ranks(self._reducer.transport, self._reducer.reducing)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self._ddp.move_to_group(new_process_group)

    def _set_optimizer_in_backward(self) -> None:
        """Torch saves copying averages to gradients that are about to be dropped. Here nothing depends on it."""

    def _set_mixed_precision_param_dtype(self, data_type: torch.dtype) -> NoReturn:
        raise NotImplementedError(
            f"After construction a reducer does not accept gradients in {data_type}: pass "
            f"mixed_precision to the wrapper's constructor."
        )

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> NoReturn:
        raise NotImplementedError(
            f"Sparse gradients travel with their own indices; ids that were agreed on beforehand (for "
            f"{', '.join(global_unique_ids)}) are something for torch built with NCCLX."
        )


def _future_of(work: Work, result: torch.Tensor) -> torch._C.Future:
    """Works of torch.distributed have one; any other is waited for."""
    if isinstance(work, dist.Work):
        return work.get_future()
    work.wait()
    future: Any = torch.futures.Future()
    future.set_result([result])
    return future
