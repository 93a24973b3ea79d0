"""`check_finite`: each bucket is tested for NaN and infinity before averaging spreads them to every rank.

An average that is NaN does not show which rank it came from. So each rank tests a bucket before it is launched, and
marks the first element that is not finite. All buckets are launched whatever was found, so that the ranks stay in
step. When the averages are in the gradients, the ranks exchange their first marks by a small all-reduce, and all
raise the same error. This comes last, since a communication hook may launch collectives until then.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minddp.core.backward_pass import Phase
from minddp.core.bucket import GradientBucket
from minddp.core.mode import Mode
from minddp.core.reducer import Reducer
from minddp.extension import Extension
from minddp.options import exclude
from minddp.platform import wording

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel

BUCKET = 1 << 41  # a rank sends the bucket's index times this, plus the mark


class CheckFinite(Mode):
    """Tests the buckets that `reducer` launches, and exchanges marks."""

    def __init__(self, reducer: Reducer):
        self._reducer = weakref.ref(reducer)
        self._marks: list[tuple[int, torch.Tensor]] = []  # by bucket, in launch order

    def first_gradient(self, param: int) -> None:
        self._marks.clear()  # an exception may have ended the last backward

    def shadow_begins(self) -> None:
        self._marks.clear()

    def before_launch(self, bucket: GradientBucket, contents: torch.Tensor) -> None:
        reducer = self._reducer()
        assert reducer is not None, "it launches"
        self._marks.append((bucket.spec.index, first_not_finite(contents)))
        if self not in reducer.futures:
            reducer.futures.append(self)

    def wait(self) -> None:
        """Exchange the marks. Collective.

        Raises:
            FloatingPointError: a gradient of some rank was not finite; the same on every rank.
        """
        reducer = self._reducer()
        assert reducer is not None, "its backward has just ended"
        if reducer.phase not in (Phase.IDLE, Phase.FINISHED):  # an exception has ended the backward
            return
        transport, device = reducer.transport, reducer.params[0].device
        first_of_rank = torch.zeros(transport.world_size, dtype=torch.int64, device=device)
        marks = ((index, mark.item()) for index, mark in self._marks)
        first_of_rank[transport.rank] = next((index * BUCKET + mark for index, mark in marks if mark), 0)
        transport.all_reduce(first_of_rank).wait()
        found = {rank: mark for rank, mark in enumerate(first_of_rank.tolist()) if mark}
        if found:
            raise not_finite(reducer, found)


def first_not_finite(contents: torch.Tensor) -> torch.Tensor:
    """A mark: twice the position of the first element that is not finite, plus 1 for NaN or 2 for infinity; or 0.

    A sum is not finite if an element is not, or it overflows. On an accelerator the host would wait for it.
    """
    flat = contents._values().view(-1) if contents.is_sparse else contents
    if flat.numel() == 0 or (flat.is_cpu and math.isfinite(flat.sum().item())):
        return torch.tensor(0, device=flat.device)
    is_finite = flat.isfinite()
    position = is_finite.byte().argmin()
    return torch.where(is_finite.take(position), 0, 2 * position + 1 + flat.take(position).isinf())


def not_finite(reducer: Reducer, mark_of_rank: dict[int, int]) -> FloatingPointError:
    offenders = []
    for rank, mark in mark_of_rank.items():
        bucket = reducer.store.plan.buckets[mark // BUCKET]
        position, is_infinite = divmod(mark % BUCKET - 1, 2)
        element = 0 if bucket.sparse else position // (2 if bucket.dtype.is_complex else 1)
        param = next(s.param for s in bucket.slots if s.offset <= element < s.offset + s.numel)
        name, kind = reducer.store.plan.params[param].name, "infinity" if is_infinite else "NaN"
        offenders.append(f"rank {rank}'s gradient of `{name}` (bucket {bucket.index}) has {kind}")
    return FloatingPointError(
        f"In backward {reducer.num_passes}, before averaging, {wording.joined(offenders)}. Now the averages in "
        f"`.grad` are not finite either, on any rank: to go on, call zero_grad() instead of optimizer.step(). Look "
        f"at the batch and the loss of {wording.ranks(list(mark_of_rank))} in this step; if training diverges, "
        f"lower the learning rate or clip gradients. With a GradScaler infinity is normal: leave check_finite out."
    )


@dataclass(eq=False)
class FiniteGradients(Extension):
    """Tests buckets for NaN and infinity before they are reduced."""

    def agreed(self) -> Mapping[str, object]:
        return {"check_finite": True}

    def check(self, arguments: Mapping[str, Any]) -> None:
        if arguments["delay_all_reduce_named_params"]:
            exclude("`delay_all_reduce_named_params`", {"`check_finite`": True})

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        ddp._reducer.modes.append(CheckFinite(ddp._reducer))
