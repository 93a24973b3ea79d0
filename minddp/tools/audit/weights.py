"""The measured weights: `.grad` as a sum of the micro-batches' gradients, by least squares. Pure.

A step has a column for each backward of each rank, and one for what was left in each rank's `.grad` before them. If
these explain too little, the columns of the step before are added. All parameters are solved together; if that does not
explain some of them, each is solved for itself, and parameters with equal weights become groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from minddp.tools.audit.recorder import Clip, MicroBatch, StepSketches
from minddp.tools.audit.sketch import NUMBERS

EXPLAINED = 0.005  # a residual below it, relative to `.grad`
DEPENDENT = 1e-5  # singular values below it, relative to the largest, are rounding
EQUAL = 1e-9  # 1 - the cosine of two equal gradients


class Source(NamedTuple):
    """A column: a backward of a rank, `ago` steps before; or what that step has left in `.grad`, with batch -1."""

    rank: int
    batch: int
    ago: int = 0


class Group(NamedTuple):
    """Parameters with the same weights [observers, sources], with the standard `errors` of these.

    The `residual` [observers] is relative to `.grad`; `earlier` is the share that comes from earlier steps. Weights of
    sources that are `alike` depend on each other.
    """

    params: tuple[int, ...]
    weights: Any
    errors: Any
    residual: Any
    earlier: Any
    alike: tuple[Source, ...]


@dataclass(frozen=True)
class AuditedStep:
    """A step of all ranks. `observers` are the ranks whose `.grad` was seen; -1 is that of all ranks, in shards.

    `clips` has a list for each rank; `same` are micro-batches that equal one of another rank.
    """

    batches: dict[Source, MicroBatch]
    clips: list[list[Clip]]
    observers: tuple[int, ...]
    sources: tuple[Source, ...]
    same: tuple[Source, ...]
    groups: tuple[Group, ...]


def solve_step(ranks: Sequence[StepSketches], before: Sequence[StepSketches], is_sharded: bool) -> AuditedStep:
    """`ranks` has the step of each rank, `before` the step before if it was audited.

    Raises:
        ValueError: a gradient is infinite or not a number, or no optimizer has stepped on one.
    """
    batches = columns_of(ranks, 0)
    columns = {source: batch.sketches for source, batch in batches.items()}
    if is_sharded:
        target = sum(rank.final for rank in ranks)[None]
        columns[Source(-1, -1, 1)] = sum(rank.leftover for rank in ranks)
    else:  # a rank without a gradient has left it to another one, as in ZeRO
        owners = np.argmax([rank.is_final for rank in ranks], 0)
        whole = np.stack([rank.final for rank in ranks])[owners, np.arange(len(owners))]
        target = np.stack([np.where(rank.is_final[:, None], rank.final, whole) for rank in ranks])
        columns |= {Source(number, -1, 1): rank.leftover for number, rank in enumerate(ranks)}
    if not all(np.isfinite(values).all() for values in (target, *columns.values())):
        raise ValueError("a gradient is infinite or not a number.")
    problem = Problem(columns, target)
    if not len(problem.params):
        raise ValueError("no optimizer has stepped on a parameter with a gradient.")
    if before and problem.residual > EXPLAINED:
        older = {source: batch.sketches for source, batch in columns_of(before, 1).items()}
        longer = Problem(columns | older, target)
        problem = longer if longer.residual < problem.residual / 2 else problem
    observers = (-1,) if is_sharded else tuple(range(len(ranks)))
    clips = [rank.clips for rank in ranks]
    return AuditedStep(batches, clips, observers, problem.sources, problem.same(), problem.groups())


def columns_of(ranks: Sequence[StepSketches], ago: int) -> dict[Source, MicroBatch]:
    return {Source(r, b, ago): batch for r, rank in enumerate(ranks) for b, batch in enumerate(rank.micro_batches)}


class Fit(NamedTuple):
    """Weights and errors [observers, sources], and the places of sources that depend on each other."""

    weights: Any
    errors: Any
    alike: Any


class Problem:
    """`columns` [parameters, 64] by source, and `target` [observers, parameters, 64]."""

    def __init__(self, columns: dict[Source, Any], target: Any):
        self.sources = tuple(source for source, column in columns.items() if source.ago == 0 or column.any())
        both = np.concatenate([np.stack([columns[source] for source in self.sources]), target])
        size = np.sqrt((both**2).sum(2)).max(0)
        self.params = np.flatnonzero(size)
        # [parameters, 64, sources], [parameters, 64, observers]: each parameter counts alike, whatever its size
        both = (both[:, self.params] / size[self.params][:, None]).transpose(1, 2, 0)
        self._columns, self._target = both[..., : len(self.sources)], both[..., len(self.sources) :]
        self._own = cache(lambda place: self._fit([place]))
        self._all = list(range(len(self.params)))

    @property
    def residual(self) -> float:
        return float(self._misses(self._all, self._fit(self._all).weights).max(initial=0))

    def same(self) -> tuple[Source, ...]:
        now = [place for place, source in enumerate(self.sources) if source.ago == 0]
        flat = self._columns.reshape(-1, len(self.sources))
        unit = flat / np.maximum(np.sqrt((flat**2).sum(0)), 1e-300)
        ranks = np.array([source.rank for source in self.sources])
        equal = (unit.T @ unit > 1 - EQUAL) & (ranks[:, None] != ranks)
        return tuple(self.sources[place] for place in now if equal[place, now].any())

    def groups(self) -> tuple[Group, ...]:
        """The largest first; one group, if all parameters have the same weights."""
        fit = self._fit(self._all)
        if self._explains(fit, self._all).all():
            return (self._group(self._all, fit),)
        left, groups = self._all, []
        for place in [place for place in self._all if not len(self._own(place).alike)]:
            if place in left:
                fit = self._own(place)
                for _ in range(2):  # again, with the weights of all that are alike
                    like = [one for one, is_so in zip(left, self._explains(fit, left), strict=True) if is_so]
                    like = like or [place]
                    fit = self._fit(like)
                groups.append(self._group(like, fit))
                left = [one for one in left if one not in like]
        if left:
            groups.append(self._group(left, self._fit(left)))
        return tuple(sorted(groups, key=lambda group: -len(group.params)))

    def _fit(self, places: Sequence[int]) -> Fit:
        rows = self._columns[places].reshape(-1, len(self.sources))
        target = self._target[places].reshape(len(rows), -1)
        sizes = np.sqrt((rows**2).sum(0))
        u, values, v = np.linalg.svd(rows / np.where(sizes, sizes, 1.0), full_matrices=False)
        keep = values > DEPENDENT * values.max(initial=0)
        inverse = (v[keep].T / values[keep]) @ u[:, keep].T / np.where(sizes, sizes, 1.0)[:, None]
        weights = inverse @ target
        spread = ((target - rows @ weights) ** 2).sum(0) / max(1, len(rows) - len(sizes))
        errors = np.sqrt((inverse**2).sum(1)[:, None] * spread)
        seen = (v[keep] ** 2).sum(0)  # of each source: how much of it lies in directions that can be seen
        return Fit(weights.T, errors.T, np.flatnonzero((seen < 0.999) & (sizes > 0)))

    def _misses(self, places: Sequence[int], weights: Any) -> Any:
        """[parameters, observers], relative to `.grad`, or to the columns where that is zero."""
        target = self._target[places]
        size = np.sqrt((target**2).sum(1))
        return np.sqrt(((target - self._columns[places] @ weights.T) ** 2).sum(1)) / np.where(size > 1e-6, size, 1.0)

    def _explains(self, fit: Fit, places: Sequence[int]) -> Any:
        """[parameters]: these weights are hardly worse than the parameter's own."""
        free = NUMBERS / max(1, NUMBERS - len(self.sources))
        own = np.stack([self._misses([place], self._own(place).weights)[0] for place in places])
        return (self._misses(places, fit.weights) <= EXPLAINED + 2 * np.sqrt(free) * own).all(1)

    def _group(self, places: Sequence[int], fit: Fit) -> Group:
        def size(of_sources: Any) -> Any:
            return np.sqrt(((self._columns[places][..., of_sources] @ fit.weights.T[of_sources]) ** 2).sum((0, 1)))

        old = np.array([source.ago > 0 for source in self.sources])
        misses = self._misses(places, fit.weights)
        params = tuple(int(self.params[place]) for place in places)
        alike = tuple(self.sources[place] for place in fit.alike)
        earlier = size(old) / np.maximum(size(old) + size(~old), 1e-300)
        return Group(params, fit.weights, fit.errors, np.sqrt((misses**2).mean(0)), earlier, alike)
