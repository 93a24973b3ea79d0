"""Bytes instead of seconds: what a section of code holds at its peak, and what it writes.

Both are counted, not estimated, and hardly depend on how busy the machine is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Peak:
    """Bytes allocated beyond what there was before; known when the block has ended."""

    nbytes: int = 0  #: the most at once
    left: int = 0  #: what was still there at the end; below 0, if more from before was freed


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Memory from torch's allocator for `device` within the block; not the memory that processes share.

    On a CPU, only what this thread frees is seen to be freed.
    """
    peak = Peak()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.nbytes = torch.cuda.max_memory_allocated() - before
        peak.left = torch.cuda.memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
    assert recorded.profiler is not None, "it is there once the profile has been taken"
    assert recorded.profiler.kineto_results is not None, "likewise"
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak.nbytes, peak.left = highest(changes), sum(changes)


def highest(changes: Sequence[int]) -> int:
    """The highest level reached, from 0, by adding up `changes` in order."""
    return max(itertools.accumulate(changes, initial=0))


def shared_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int:
    """This process's part of the memory that it shares with others: what W processes have mapped counts 1/W here.

    Linux only, as is minddp's shared memory: elsewhere there is nothing to count.
    """
    if not rollup.exists():
        return 0
    fields = dict(line.split(":", 1) for line in rollup.read_text().splitlines()[1:])
    return int(fields["Pss_Shmem"].removesuffix("kB")) * 1024


class WrittenBytes(TorchDispatchMode):
    """Within this context, counts what tensor operations write: results, outputs and what is changed in place.

    Operations called from C++ count too. What other threads write does not, nor what a process group writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.nbytes += written_by(func, args, kwargs or {}, result)
        return result


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that one call wrote, by its schema: arguments marked as written, and results that alias nothing.

    An allocation writes nothing: `empty` and its kind.
    """
    schema = func._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    changed = [
        given.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    makes_fresh = "empty" not in schema.name and all(r.alias_info is None for r in schema.returns)
    fresh = result if makes_fresh else None
    tensors = [leaf for leaf in tree_leaves([changed, fresh]) if isinstance(leaf, Tensor)]
    return sum(map(nbytes, tensors))


def nbytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes
