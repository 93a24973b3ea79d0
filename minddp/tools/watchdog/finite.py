"""`check_finite`: each bucket is tested for NaN and infinity before averaging spreads them to every rank.

[Note: finite gradients]
An average that is NaN does not show from which rank that came. So each rank tests a bucket before it is launched,
and notes the first number that is not finite. All buckets are launched whatever was found, so that the ranks stay
in step. When their averages are in the gradients, the ranks exchange what they have noted, and all raise an error.

If all is well they need to exchange nothing, and know it without a message: a rank that has found something writes
NaN to the front of its bucket, so on every rank the sum begins with NaN. A communication hook need not add, so with
one the exchange is always made; at the end, since a hook may launch collectives until then.
"""

from __future__ import annotations

import math
import weakref

import torch

from minddp.core.backward_pass import Phase
from minddp.core.bucket import GradientBucket
from minddp.core.packing import Scaling
from minddp.core.reducer import Reducer
from minddp.core.reduction import AllReduce, Reducing, Reduction
from minddp.platform import wording

FINITE = 1 << 62  # is greater than any mark
BUCKET = 1 << 41  # a mark is the bucket's index times this, plus twice the element's position, plus 1 if infinite


class CheckFinite:
    """A `Reducing`: tests what `reducing` launches, waits once averages are in. See [Note: finite gradients]."""

    def __init__(self, reducing: Reducing, reducer: Reducer):
        self._reducing = reducing
        self._reducer = weakref.ref(reducer)
        self._weighs_nothing = False
        self._marks: list[torch.Tensor] = []
        self._launched: list[Reduction] = []

    def open(self) -> Scaling:
        scaling = self._reducing.open()
        self._marks, self._launched = [], []  # an exception may have ended the last backward
        self._weighs_nothing = scaling.divisor == math.inf
        return scaling

    def launch(self, bucket: GradientBucket, contents: torch.Tensor | None = None, *, is_last: bool) -> Reduction:
        reducer = self._reducer()
        assert reducer is not None, "it launches"
        if contents is None and not self._weighs_nothing:
            mark = first_not_finite(bucket)
            _numbers(bucket.wire)[:1].masked_fill_(mark != FINITE, math.nan)
            self._marks.append(bucket.spec.index * BUCKET + mark)
        if self not in reducer.futures:
            reducer.futures.append(self)
        self._launched.append(self._reducing.launch(bucket, contents, is_last=is_last))
        return self._launched[-1]

    def wait(self) -> None:
        """Exchange the marks, if some rank has found something. Collective.

        Raises:
            FloatingPointError: a gradient of some rank was not finite; the same on every rank.
        """
        reducer = self._reducer()
        assert reducer is not None, "its backward has just ended"
        if reducer.phase not in (Phase.IDLE, Phase.FINISHED):  # an exception has ended the backward
            return
        marks, launched = self._marks, self._launched
        self._marks, self._launched = [], []
        if all(map(_begins_with_number, launched)):
            return
        transport, device = reducer.transport, reducer.params[0].device
        first_of_rank = torch.zeros(transport.world_size, dtype=torch.int64, device=device)
        first_of_rank[transport.rank] = min([FINITE, *(mark.item() for mark in marks)])
        transport.all_reduce(first_of_rank).wait()
        found = {rank: mark for rank, mark in enumerate(first_of_rank.tolist()) if mark != FINITE}
        if found:
            raise not_finite(reducer, found)


def first_not_finite(bucket: GradientBucket) -> torch.Tensor:
    """Twice the position of the first element that is NaN or infinite, plus 1 if it is infinite; or `FINITE`.

    A sum is not finite if an element is not, or it overflows. On an accelerator the host would wait for it.
    """
    flat = _numbers(bucket.wire)
    if flat.numel() == 0 or (flat.is_cpu and math.isfinite(flat.sum().item())):
        return torch.tensor(FINITE, device=flat.device)
    is_finite = flat.isfinite()
    position = is_finite.byte().argmin()
    return torch.where(is_finite.take(position), FINITE, 2 * position + flat.take(position).isinf())


def _begins_with_number(reduction: Reduction) -> bool:
    """False if some rank has found something, or may have. The rows of a sparse sum may be in any order."""
    if not isinstance(reduction, AllReduce):
        return False
    sums = _numbers(reduction.buffer)
    return not (sums if reduction.buffer.is_sparse else sums[:1]).isnan().any().item()


def _numbers(wire: torch.Tensor) -> torch.Tensor:
    return wire._values().view(-1) if wire.is_sparse else wire


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
