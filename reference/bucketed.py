r"""Rung 4, bucketed: a few messages, planned beforehand, launched during backward. DDP is this at heart.

    time ->
    compute        | bwd 3 | bwd 2 | bwd 1 |          | unpack | step |
    communication                  | b3 w3 b2 | w2 b1 w1 |
                                           \_ exposed _/

What it costs, for K buckets (B bytes, latency a, bandwidth beta, as in `naive.py`):

    messages  K        bytes  B        exposed  K*a + B/beta, less what backward hides; two copies of B bytes

K is a choice. One bucket is `flat`: least latency, no overlap. One bucket per parameter is `overlapped`.
Between them lies the best of both: buckets large enough that latency is small beside transfer, and small
enough that the first one is launched early. (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2, has the
measurements.)

[Note: launch order]
Collectives have no address: the k-th launch of one rank meets the k-th launch of the others. So buckets are
launched in *plan order*, which every rank computes alike from the registration order of the parameters,
never in the order in which they become ready. A bucket that is ready early waits until those before it have
gone. The plan runs through the parameters backwards, because that is roughly how backward finishes them; a
bad guess costs overlap, never correctness.

What the next rung improves: nothing in the speed; it removes the call to `synchronize()` (`automatic.py`).

What a complete DDP has beyond this: parameters that go unused, a second plan from the true order of the first
backward, gradients that live in the buckets (no copies), buffers kept in step, hooks that compress, recovery
from an exception within backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from .flat import pack, unpack
from .interface import DataParallel

MIB = 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together. Decided once, and alike on every rank."""

    index: int
    names: tuple[str, ...]


@dataclass
class BackwardPass:
    """The state of one backward: made afresh for each, so that nothing is ever reset by hand."""

    arrived: set[str] = field(default_factory=set)
    launched: list[tuple[Tensor, dist.Work]] = field(default_factory=list)


class Bucketed(DataParallel):
    """A few messages a step, most of them hidden behind backward."""

    def __init__(self, module: nn.Module, cap_bytes: int = 25 * MIB):
        super().__init__(module)
        self.plan = assign_buckets(self.trainable, cap_bytes)
        self.current = BackwardPass()
        for name, param in self.trainable.items():
            param.register_post_accumulate_grad_hook(partial(self.on_grad_accumulated, name))

    def on_grad_accumulated(self, name: str, param: nn.Parameter) -> None:
        """Autograd has completed `param.grad`: note it, and launch what has become possible."""
        if not self.synchronizing:
            return
        self.refuse_second_arrival(name, self.current.arrived)
        self.current.arrived.add(name)
        self.launch_ready_buckets()

    def launch_ready_buckets(self) -> None:
        # See [Note: launch order]: stop at the first bucket that is not ready, whatever comes after it.
        for bucket in self.plan[len(self.current.launched) :]:
            if not self.current.arrived.issuperset(bucket.names):
                return
            self.launch(bucket)

    def launch(self, bucket: Bucket) -> None:
        buffer = pack(self.params_of(bucket))
        work = self.wire.average(buffer, label=f"bucket {bucket.index}")
        self.current.launched.append((buffer, work))

    def synchronize(self) -> None:
        for bucket, buffer in zip(self.plan, self.finished_buffers(), strict=True):
            unpack(buffer, self.params_of(bucket))

    def finished_buffers(self) -> Iterator[Tensor]:
        """End this backward: what it has launched, in plan order, each as soon as it is complete."""
        finished, self.current = self.current, BackwardPass()
        self.require_every_gradient(finished.arrived)
        for buffer, work in finished.launched:
            work.wait()
            yield buffer

    def params_of(self, bucket: Bucket) -> list[nn.Parameter]:
        return [self.trainable[name] for name in bucket.names]


def assign_buckets(params: Mapping[str, nn.Parameter], cap_bytes: int) -> tuple[Bucket, ...]:
    """Cut the parameters, last registered first, into buckets of one dtype and device.

    A bucket is closed once it holds at least `cap_bytes`; a parameter is never split, so a bucket may be
    larger than its cap. Pure: same parameters, same plan, on every rank.
    """
    if cap_bytes < 0:
        raise ValueError(f"cap_bytes is {cap_bytes}. Give a size in bytes; 0 means a bucket per parameter.")
    buckets: list[Bucket] = []
    names: list[str] = []
    for name, param in reversed([*params.items()]):
        if names:
            before = params[names[-1]]
            is_full = sum(params[each].nbytes for each in names) >= cap_bytes
            if is_full or (param.dtype, param.device) != (before.dtype, before.device):
                buckets.append(Bucket(len(buckets), tuple(names)))
                names = []
        names.append(name)
    buckets.append(Bucket(len(buckets), tuple(names)))
    return tuple(buckets)
