"""`ddp.reducer`: the methods of torch's `dist.Reducer`.

Accelerate, Lightning, and torch's pipelining, communication hooks and tests call them. Names and meanings are
torch's (`torch/csrc/distributed/c10d/reducer.cpp`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from minddp.comm_hooks import GradBucket
from minddp.core.reducer import Reducer


class ReducerFacade:
    """Belongs to one wrapper, which it references weakly."""

    def __init__(self, ddp: Any, reducer: Reducer):
        self._ddp = weakref.proxy(ddp)
        self._reducer = reducer

    # ------------------------------------------------------------------ around forward and backward

    prepare_for_forward = property(attrgetter("_ddp.logger.begin_iteration"))
    _delay_all_reduce = property(attrgetter("_reducer.reduce_recorded"))
    _install_post_backward_futures = property(attrgetter("_reducer.futures.extend"))
    _check_reducer_finalized = property(attrgetter("_reducer.ensure_finished"))

    def prepare_for_backward(self, outputs: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Synchronise the next backward, even if its forward ran under `no_sync`.

        Raises:
            RuntimeError: gradients of the last backward are missing. (Torch ignores that.)
        """
        self._reducer.ensure_finished()
        self._reducer.prepare_for_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        self._reducer.ensure_finished()
        return self._reducer.rebuild_if_due()

    # ------------------------------------------------------------------ communication

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch._C.Future:
        """Sum the bucket's buffer over the ranks, in place. The future holds it in a list."""
        return self._ddp.process_group.allreduce([bucket.buffer()]).get_future()

    def _get_local_used_map(self) -> torch.Tensor | None:
        """The number of ranks that used each parameter in the last backward, int32; `None` if it is not counted."""
        usage = getattr(self._reducer.usage_tracker, "usage", None)
        return None if usage is None else usage.sums

    # ------------------------------------------------------------------ changed after construction

    _set_static_graph = property(attrgetter("_ddp.become_static"))
    _update_process_group = property(attrgetter("_ddp.move_to_group"))
    _remove_autograd_hooks = property(attrgetter("_reducer.hooks.remove"))

    def _ddp_graph_static(self) -> bool:
        return self._ddp.logger.graph_is_static

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._ddp.logger.sample_rate = sample_rate

    def set_logger(self, logger: dist.Logger) -> None:
        self._reducer.events.on_error = lambda error: logger.set_error_and_log(str(error))

    def _reset_state(self) -> None:
        """Forget the last backward, however it has ended, and the order of the first."""
        self._reducer.change_ranks(self._reducer.transport, self._reducer.reduce_strategy)
