"""`check_finite`: each bucket is tested for NaN and infinity before averaging spreads them to every rank.

An average that is NaN does not show which rank it came from. So each rank tests a bucket before it is launched, and
marks the first element that is not finite. All buckets are launched whatever was found, so that the ranks stay in
step. When the averages are in the gradients, the ranks exchange their marks, and all raise an error.

If all is well they exchange nothing, and know it without a message: a rank with a mark writes NaN to the front of
its bucket, so on every rank the sum begins with NaN. A communication hook need not add, so with one the exchange is
always made; at the end, since a hook may launch collectives until then.
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
from minddp.core.reduction import AllReduceStrategy
from minddp.extension import Extension
from minddp.options import exclude
from minddp.platform import wording

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel

FINITE = 1 << 62  # is greater than any mark
BUCKET = 1 << 41  # a mark is the bucket's index times this, plus twice the element's position, plus 1 if infinite


class CheckFinite(Mode):
    """Tests the buckets that `reducer` launches, and exchanges marks."""

    def __init__(self, reducer: Reducer):
        self._reducer = weakref.ref(reducer)
        self._begin()

    def _begin(self) -> None:
        self._marks: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []  # of this backward's buckets, once reduced

    def first_gradient(self, param: int) -> None:
        self._begin()  # an exception may have ended the last backward

    def shadow_begins(self) -> None:
        self._begin()

    def before_launch(self, bucket: GradientBucket, contents: torch.Tensor) -> None:
        reducer = self._reducer()
        assert reducer is not None, "it launches"
        mark = first_not_finite(contents)
        _numbers(contents)[:1].masked_fill_(mark != FINITE, math.nan)
        self._marks.append(bucket.spec.index * BUCKET + mark)
        self._sums.append(contents)
        if self not in reducer.futures:
            reducer.futures.append(self)

    def wait(self) -> None:
        """Exchange the marks if some rank has one. Collective.

        Raises:
            FloatingPointError: a gradient of some rank was not finite; the same on every rank.
        """
        reducer = self._reducer()
        assert reducer is not None, "its backward has just ended"
        if reducer.phase not in (Phase.IDLE, Phase.FINISHED):  # an exception has ended the backward
            return
        marks, sums = self._marks, self._sums
        self._begin()
        if isinstance(reducer.reduce_strategy, AllReduceStrategy) and all(map(_begins_with_number, sums)):
            return
        transport, device = reducer.transport, reducer.params[0].device
        first_of_rank = torch.zeros(transport.world_size, dtype=torch.int64, device=device)
        first_of_rank[transport.rank] = min([FINITE, *(mark.item() for mark in marks)])
        transport.all_reduce(first_of_rank).wait()
        found = {rank: mark for rank, mark in enumerate(first_of_rank.tolist()) if mark != FINITE}
        if found:
            raise not_finite(reducer, found)


def first_not_finite(contents: torch.Tensor) -> torch.Tensor:
    """Twice the position of the first element that is NaN or infinite, plus 1 if it is infinite; or `FINITE`.

    A sum is not finite if an element is not, or it overflows. On an accelerator the host would wait for it.
    """
    flat = _numbers(contents)
    if flat.numel() == 0 or (flat.is_cpu and math.isfinite(flat.sum().item())):
        return torch.tensor(FINITE, device=flat.device)
    is_finite = flat.isfinite()
    position = is_finite.byte().argmin()
    return torch.where(is_finite.take(position), FINITE, 2 * position + flat.take(position).isinf())


def _begins_with_number(sums: torch.Tensor) -> bool:
    """False if some rank has a mark, or may have. The rows of a sparse sum may be in any order."""
    numbers = _numbers(sums)
    return not (numbers if sums.is_sparse else numbers[:1]).isnan().any().item()


def _numbers(contents: torch.Tensor) -> torch.Tensor:
    return contents._values().view(-1) if contents.is_sparse else contents


def not_finite(reducer: Reducer, mark_of_rank: dict[int, int]) -> FloatingPointError:
    offenders = []
    for rank, mark in mark_of_rank.items():
        bucket, place = reducer.plan.buckets[mark // BUCKET], mark % BUCKET
        element = 0 if bucket.sparse else place // 2 // (2 if bucket.dtype.is_complex else 1)
        param = next(s.param for s in bucket.slots if s.offset <= element < s.offset + s.numel)
        name, kind = reducer.plan.params[param].name, "infinity" if place % 2 else "NaN"
        offenders.append(f"rank {rank}'s gradient of `{name}` (bucket {bucket.index}) has {kind}")
    others = [rank for rank in range(reducer.transport.world_size) if rank not in mark_of_rank]
    verb = "was" if len(others) == 1 else "were"
    return FloatingPointError(
        f"In backward {reducer.num_passes}, before averaging, {wording.joined(offenders)}"
        f"{f'; {wording.ranks(others)} {verb} finite' if others else ''}. Now the averages in `.grad` are not "
        f"finite either, on any rank: to go on, call zero_grad() instead of optimizer.step(). Look at the batch "
        f"and the loss of {wording.ranks(list(mark_of_rank))} in this step; if training diverges, lower the "
        f"learning rate or clip gradients. With a GradScaler infinity is normal: leave check_finite out."
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
