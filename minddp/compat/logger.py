"""`ddp.logger` and the logging data: configuration, times of the last sampled iteration, errors.

Names and meanings are torch's (`torch/csrc/distributed/c10d/logger.cpp`). Frameworks and torch's own tests read
them through `ddp._get_ddp_logging_data()`.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DDPLoggingData

from minddp.compat.sampled_iteration import SPANS, SampledIteration
from minddp.core.events import EventKind

ALWAYS_SAMPLED = 10  # iterations; afterwards one in `sample_rate`
CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
# Environment variables whose values are logged, under their names in lower case.
VARIABLES = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
BACKEND_VARIABLES = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
RENAMED = (
    "NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING",
)  # TORCH_NCCL_... takes precedence


class Logger(dist.Logger):
    """Collects the logging data of `ddp`.

    An iteration begins with a forward whose backward will be synchronised. The first `ALWAYS_SAMPLED` iterations
    are sampled, and then every `sample_rate`-th. Only a sampled iteration watches the reducer's events.

    Helpers in C++, such as `dist._compute_bucket_assignment_by_size`, note errors in a logger, which must be
    torch's. So this class derives from torch's logger. That needs a reducer of torch's: one with a dummy parameter,
    which only counts iterations. The base class holds the errors noted in C++, the name of the communication hook,
    and `join`.
    """

    def __init__(self, ddp: Any):
        # Hazard: with a real group, a C++ reducer that held its last reference would wait for the group's threads
        # while it holds the GIL, and these threads may be waiting for the GIL.
        group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
        self._counterpart = dist.Reducer([nn.Parameter(torch.zeros(1))], [[0]], [1], group)
        super().__init__(self._counterpart)
        self._ddp = weakref.proxy(ddp)

        # The logging data, by name.
        self._strs: dict[str, str] = {}
        self._ints: dict[str, int] = {}
        self._totals_ns: Counter[str] = Counter()  # of the spans, over all sampled iterations
        self._num_spans: Counter[str] = Counter()

        self._unused_seen: set[tuple[int, ...]] = set()  # at most two: the graph is static if there is one
        self.iteration = 0
        self.sample_rate = 100
        self.sampled: SampledIteration | None = None
        self._set_construction_data(ddp)

    def _set_construction_data(self, ddp: Any) -> None:
        plan = ddp._reducer.plan
        dtypes = {CPP_NAMES.get(param.dtype, str(param.dtype).removeprefix("torch.")) for param in plan.params}
        if ddp.static_graph:
            self._set_static_graph()
        self._strs |= {
            "module_name": type(ddp.module).__name__,
            "device_ids": _listed(ddp.device_ids or ()),
            "dtypes": _listed(sorted(dtypes)),
            "bucket_sizes": _listed(bucket.nbytes for bucket in plan.buckets),
            "initial_bucket_size_limits": _listed(bucket.cap_bytes for bucket in plan.buckets),
        }
        self._ints |= {
            "iteration": 0,
            "num_parameter_tensors": len(plan.params),
            "total_parameter_size_bytes": sum(param.nbytes for param in plan.params),
            "is_multi_device_module": int(ddp.is_multi_device_module),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in ddp.module.modules())),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        }
        self.set_group(ddp.process_group)

    # ------------------------------------------------------------------ called by the wrapper

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Log the group, and the environment variables of its backend."""
        backend = group.name()
        for name in (*VARIABLES, *BACKEND_VARIABLES.get(backend, ())):
            value = os.environ.get(f"TORCH_{name}") if name in RENAMED else None
            self._strs[name.lower()] = os.environ.get(name, "N/A") if value is None else value
        self._strs["backend_name"] = backend
        self._ints |= {"world_size": group.size(), "rank": group.rank()}
        if backend == "gloo":
            gloo: Any = group._get_backend(torch.device("cpu"))
            unwrapped = getattr(gloo, "wrapped_pg", gloo)  # wrapped under TORCH_DISTRIBUTED_DEBUG=DETAIL
            self._ints["gloo_num_threads"] = unwrapped.options._threads

    def begin_iteration(self) -> None:
        self._note_unused()
        if self.sampled is not None:
            self._ddp._reducer.events.unwatch(self.sampled.observe)
            self.sampled = None
        self._counterpart.prepare_for_forward()
        self.iteration += 1
        if self.iteration <= ALWAYS_SAMPLED or self.iteration % self.sample_rate == 0:
            self.sampled = SampledIteration(self._ddp.device)
            self._ddp._reducer.events.watch(self.sampled.observe)

    def set_runtime_stats_and_log(self) -> None:
        """Log the last iteration, if it was sampled. Called before the next one begins."""
        if self.sampled is None:
            return
        sampled, reducer = self.sampled, self._ddp._reducer
        is_complete = EventKind.BACKWARD_END in sampled.moments
        unused = set(reducer.usage_tracker.last_unused or ()) if is_complete else set()
        self._ints |= {
            "iteration": self.iteration,
            "unused_parameter_size": sum(reducer.plan.params[param].nbytes for param in unused),
            "num_buckets_reduced": sampled.num_buckets_reduced,
            "has_rebuilt_buckets": int(reducer.store.has_rebuilt),
            **sampled.unix_ns(),
        }
        if reducer.store.has_rebuilt:
            buckets = reducer.plan.buckets
            params = (" ".join(str(slot.param) for slot in bucket.slots) for bucket in buckets)
            self._strs |= {
                "rebuilt_bucket_sizes": _listed(bucket.nbytes for bucket in buckets),
                "rebuilt_bucket_size_limits": _listed(bucket.cap_bytes for bucket in buckets),
                "rebuilt_per_bucket_param_indices": _listed(params),
            }
        arrived = [param for param in dict.fromkeys(sampled.params_ready) if param not in unused]
        if arrived:
            self._strs["prev_iteration_grad_ready_order_indices"] = _listed(arrived)
        spans_ns = sampled.spans_ns()
        self._totals_ns.update(spans_ns)
        self._num_spans.update(spans_ns.keys())
        for name in SPANS:  # 0 if there was none
            self._ints[name] = spans_ns.get(name, 0)
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
        self._ints["static_graph"] = int(self._ddp.static_graph)

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        """The current values. Sizes are bytes, times nanoseconds, flags 0 or 1. Errors stay in later samples."""
        data = super()._get_ddp_logging_data()
        ints = {**data.ints_map, **self._ints}
        ints["iteration"] = max(data.ints_map.get("iteration", 0), self._ints["iteration"])
        if self.iteration > 1 and not self._ddp.static_graph:
            ints["can_set_static_graph"] = int(self.graph_is_static)
        data.strs_map, data.ints_map = {**data.strs_map, **self._strs}, ints
        return data


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
