"""`ddp.logger` and the logging data: configuration, times of the last sampled iteration, errors.

Names and meanings are torch's (`torch/csrc/distributed/c10d/logger.cpp`). Frameworks and torch's own tests read
them through `ddp._get_ddp_logging_data()`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DDPLoggingData

from minddp.core.events import Event, EventKind
from minddp.platform import streams

ALWAYS_SAMPLED = 10  # iterations; afterwards one in `sample_rate`
# As in torch, backward "begins" when forward has ended: it includes the loss.
MOMENTS = {
    "forward_compute_time_start": EventKind.FORWARD_BEGIN,
    "backward_compute_time_start": EventKind.FORWARD_END,
    "backward_comm_time_start": EventKind.BUCKET_LAUNCHED,
    "backward_compute_time_end": EventKind.GRADIENTS_COMPLETE,
    "backward_comm_time_end": EventKind.BACKWARD_END,
}
SPANS = {
    "forward_compute_time": (EventKind.FORWARD_BEGIN, EventKind.FORWARD_END),
    "backward_compute_time": (EventKind.FORWARD_END, EventKind.GRADIENTS_COMPLETE),
    "backward_comm_time": (EventKind.BUCKET_LAUNCHED, EventKind.BACKWARD_END),
    "backward_compute_comm_overlap_time": (EventKind.BUCKET_LAUNCHED, EventKind.GRADIENTS_COMPLETE),
}


class Logger(dist.Logger):
    """Collects the logging data of `ddp`.

    An iteration begins with a forward whose backward will be synchronised. Only a sampled one watches the reducer's
    events. As in torch, it cannot be captured in a CUDA graph.

    Helpers in C++, such as `dist._compute_bucket_assignment_by_size`, note errors in a logger of torch's. So this
    class derives from it, and it logs the construction of a reducer of torch's, whose parameters have no memory.
    """

    def __init__(self, ddp: Any):
        self._counterpart = _counterpart_of(ddp)
        super().__init__(self._counterpart)
        self._ddp = weakref.proxy(ddp)
        self.iteration = 0
        self.sample_rate = 100
        self._unused_seen: set[tuple[int, ...]] = set()  # at most two: the graph is static if there is one

        # The sampled iteration. The first event of each kind counts.
        self._is_sampled = False
        self._moments: dict[EventKind, tuple[int, Any]] = {}  # nanoseconds since 1970, and an event of the device
        self._params_ready: list[int] = []  # in the order of their gradients
        self._num_buckets_reduced = 0

        # The logging data, by name, that torch's logger does not have.
        self._strs: dict[str, str] = {"backend_name": ddp.process_group.name()}
        self._ints: dict[str, int] = {"is_multi_device_module": int(ddp.is_multi_device_module)}
        self._totals_ns: Counter[str] = Counter()  # of the spans, over all sampled iterations
        self._num_spans: Counter[str] = Counter()
        self._log_construction(ddp)

    def _log_construction(self, ddp: Any) -> None:
        output_device = -1 if ddp.output_device is None else ddp.output_device
        has_sync_bn = any(isinstance(child, nn.SyncBatchNorm) for child in ddp.module.modules())
        flags = (bool(ddp.forward_sync_buffers), has_sync_bn, ddp.static_graph)
        self.set_construction_data_and_log(type(ddp.module).__name__, ddp.device_ids or [], output_device, *flags)
        if self._strs["backend_name"] == "gloo":
            for name in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
                self._strs[name.lower()] = os.environ.get(name, "N/A")
            gloo = ddp.process_group._get_backend(torch.device("cpu"))
            unwrapped = getattr(gloo, "wrapped_pg", gloo)  # wrapped under TORCH_DISTRIBUTED_DEBUG=DETAIL
            self._ints["gloo_num_threads"] = unwrapped.options._threads

    # ------------------------------------------------------------------ called by the wrapper

    def begin_iteration(self) -> None:
        self._note_unused()
        events = self._ddp._reducer.events
        if self._is_sampled:
            events.unwatch(self._observe)
        self._counterpart.prepare_for_forward()
        self.iteration += 1
        self._is_sampled = self.iteration <= ALWAYS_SAMPLED or self.iteration % self.sample_rate == 0
        if self._is_sampled:
            self._moments, self._params_ready, self._num_buckets_reduced = {}, [], 0
            self._device = self._ddp.device  # a thread of the transport may observe after the wrapper has gone
            events.watch(self._observe)

    def _observe(self, event: Event) -> None:
        kind = event.kind
        # In a recorded backward, parameters are also marked ready after GRADIENTS_COMPLETE, in any order.
        if kind is EventKind.PARAM_READY and EventKind.GRADIENTS_COMPLETE not in self._moments:
            self._params_ready.append(event.subject)
        if kind is EventKind.BUCKET_LAUNCHED:
            self._num_buckets_reduced += 1
        if kind in MOMENTS.values() and kind not in self._moments:
            on_device = streams.timed_event(self._device) if streams.has_streams(self._device) else None
            self._moments[kind] = (time.time_ns(), on_device)

    def set_runtime_stats_and_log(self) -> None:
        """Log the last iteration, if it was sampled. Called before the next one begins."""
        if not self._is_sampled:
            return
        reducer, moments = self._ddp._reducer, self._moments
        is_complete = EventKind.BACKWARD_END in moments
        unused = set(reducer.usage_tracker.last_unused or ()) if is_complete else set()
        self._ints |= {
            "iteration": self.iteration,
            "unused_parameter_size": sum(reducer.store.plan.params[param].nbytes for param in unused),
            "num_buckets_reduced": self._num_buckets_reduced,
            "has_rebuilt_buckets": int(reducer.store.has_rebuilt),
            **{name: moments[kind][0] if kind in moments else 0 for name, kind in MOMENTS.items()},
        }
        if reducer.store.has_rebuilt:
            buckets = reducer.store.plan.buckets
            params = (" ".join(str(slot.param) for slot in bucket.slots) for bucket in buckets)
            self._strs["rebuilt_bucket_sizes"] = _listed(bucket.nbytes for bucket in buckets)
            self._strs["rebuilt_per_bucket_param_indices"] = _listed(params)
        arrived = [param for param in dict.fromkeys(self._params_ready) if param not in unused]
        if arrived:
            self._strs["prev_iteration_grad_ready_order_indices"] = _listed(arrived)
        for name, (begin, end) in SPANS.items():
            ended = begin in moments and end in moments
            span = _nanoseconds_between(moments[begin], moments[end]) if ended else -1
            if span >= 0:  # the first backward of a static graph has no overlap
                self._totals_ns[name] += span
                self._num_spans[name] += 1
            self._ints[name] = max(span, 0)
            self._ints[f"avg_{name}"] = self._totals_ns[name] // max(self._num_spans[name], 1)

    def _note_unused(self) -> None:
        unused = self._ddp._reducer.usage_tracker.last_unused
        if unused is not None and len(self._unused_seen) < 2:
            self._unused_seen.add(tuple(unused))

    @property
    def graph_is_static(self) -> bool:
        """True if every backward so far has left the same parameters unused."""
        self._note_unused()
        return len(self._unused_seen) < 2

    def _set_static_graph(self) -> None:
        self._counterpart._set_static_graph()
        super()._set_static_graph()

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        """The current values. Sizes are bytes, times nanoseconds, flags 0 or 1. Errors stay in later samples."""
        data = super()._get_ddp_logging_data()
        ints = {**data.ints_map, **self._ints}
        ints["iteration"] = max(data.ints_map["iteration"], self._ints.get("iteration", 0))
        if self.iteration > 1 and not self._ddp.static_graph:
            ints["can_set_static_graph"] = int(self.graph_is_static)
        data.strs_map, data.ints_map = {**data.strs_map, **self._strs}, ints
        return data


def _counterpart_of(ddp: Any) -> dist.Reducer:
    """A reducer in C++ with the plan and the options of `ddp`, of parameters without memory."""
    # Hazard: with a real group, a C++ reducer that held its last reference would wait for the group's threads while
    # it holds the GIL, and these threads may be waiting for the GIL.
    group = dist.ProcessGroup(ddp.process_group.rank(), ddp.process_group.size())  # type: ignore[call-arg]
    if ddp.process_group.name() == "nccl":  # its environment is logged
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    plan = ddp._reducer.store.plan
    shapes = [(param.numel, param.dtype) for param in plan.params] or [(1, torch.float32)]  # if all are delayed
    counterpart = dist.Reducer(
        [torch.empty(numel, dtype=dtype, device="meta", requires_grad=True) for numel, dtype in shapes],
        [[slot.param for slot in bucket.slots] for bucket in plan.buckets] or [[0]],
        [bucket.cap_bytes for bucket in plan.buckets] or [1],
        group,
        bucket_bytes_cap=ddp.bucket_bytes_cap,
        find_unused_parameters=ddp.find_unused_parameters,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
    )
    if ddp.static_graph:
        counterpart._set_static_graph()
    return counterpart


def _nanoseconds_between(begin: tuple[int, Any], end: tuple[int, Any]) -> int:
    """Measured on the device if it has streams, since the host runs ahead of it. Then waits for the device."""
    if begin[1] is None or end[1] is None:
        return end[0] - begin[0]
    end[1].synchronize()
    return int(begin[1].elapsed_time(end[1]) * 1e6)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
