"""The measured weights: `.grad` as a sum of the micro-batches' gradients, by least squares. Pure.

A step has a column for each backward of each rank, and one for what was left in each rank's `.grad`. If these
explain too little, the columns of the step before are added. All parameters are solved together; if that does not
explain some of them, each is solved for itself: those that its weights explain, too, become a group, and those that
nothing explains another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minddp.tools.audit.loss import Loss
from minddp.tools.audit.recorder import Clip, MicroBatch, StepSketches
from minddp.tools.audit.sketch import NUMBERS

EXPLAINED = 0.01  # a residual below it, relative to `.grad`
DEPENDENT = 1e-5  # singular values below it, relative to the largest, are rounding
CLOSE = 0.02  # relative; weights are measured more exactly than that
TINY = 1e-300


class GradientPart(NamedTuple):
    """A column: backward `number` of a rank, `ago` steps before; or what that step has left in `.grad`, with -1."""

    rank: int
    number: int
    ago: int
    batch: MicroBatch


class Group(NamedTuple):
    """Parameters with the same weights [observers, sources], NaN if a source gives nothing to these parameters.

    The `residual` is relative to `.grad`; `earlier` is the share of earlier steps. The weights of sources that are
    `alike` depend on each other, so far that they cannot be measured.
    """

    params: tuple[int, ...]
    weights: Any
    residual: float
    earlier: float
    alike: tuple[GradientPart, ...]


class AuditedStep(NamedTuple):
    """A step of all ranks, with the clips of each."""

    clips: list[list[Clip]]
    sources: tuple[GradientPart, ...]
    groups: tuple[Group, ...]


def solve_step(ranks: Sequence[StepSketches], before: Sequence[StepSketches], is_sharded: bool) -> AuditedStep:
    """`ranks` has the step of each rank, `before` the step before if it was audited. Observers are the ranks whose
    `.grad` was seen, or a single one that has the shards of all ranks.

    Raises:
        ValueError: a gradient is infinite or not a number, or no optimizer has stepped on one.
    """
    finals, left, are_final = (np.stack([getattr(it, of) for it in ranks]) for of in ("final", "left", "are_final"))
    if is_sharded:
        finals, left = finals.sum(0, keepdims=True), left.sum(0, keepdims=True)
    else:  # a rank without a gradient has left it to another one, as in ZeRO
        owners = np.where(are_final, np.arange(len(ranks))[:, None], are_final.argmax(0))
        finals = finals[owners, np.arange(finals.shape[1])]
    parts = [
        *parts_of(ranks, 0),
        *(GradientPart(rank, -1, 1, MicroBatch("", Loss(), one)) for rank, one in enumerate(left)),
    ]
    if not all(np.isfinite(values).all() for values in (finals, *(part.batch.sketches for part in parts))):
        raise ValueError("a gradient is infinite or not a number.")
    are_stepped = are_final.any(0)
    if not any(part.batch.sketches[are_stepped].any() for part in parts if part.ago == 0):
        raise ValueError("no optimizer has stepped on a parameter with a gradient.")
    problem = Problem(parts, finals, are_stepped)
    if before and problem.largest_miss > EXPLAINED:
        longer = Problem([*parts, *parts_of(before, 1)], finals, are_stepped)
        problem = longer if longer.largest_miss < problem.largest_miss / 2 else problem
    return AuditedStep([rank.clips for rank in ranks], problem.sources, problem.groups())


def parts_of(ranks: Sequence[StepSketches], ago: int) -> Iterator[GradientPart]:
    for rank, step in enumerate(ranks):
        yield from (GradientPart(rank, number, ago, batch) for number, batch in enumerate(step.micro_batches))


class Problem:
    """Columns, and `finals` [observers, parameters, 64]; only of the parameters stepped on."""

    def __init__(self, parts: Sequence[GradientPart], finals: Any, are_stepped: Any):
        self.sources = tuple(part for part in parts if part.ago == 0 or part.batch.sketches.any())
        both = np.stack([*(source.batch.sketches for source in self.sources), *finals])
        size = np.sqrt((both**2).sum(2)).max(0) * are_stepped
        self.params = np.flatnonzero(size).tolist()
        # [parameters, 64, sources], [parameters, 64, observers]: each parameter counts alike, whatever its size
        both = (both[:, self.params] / size[self.params][:, None]).transpose(1, 2, 0)
        self._columns, self._finals = both[..., : len(self.sources)], both[..., len(self.sources) :]
        self._all = list(range(len(self.params)))
        self._whole = self._solve(self._all)
        self.largest_miss = float(self._misses(self._whole, self._all).max(initial=0))

    def groups(self) -> tuple[Group, ...]:
        """The largest first; one group, if all parameters have the same weights."""
        if self.largest_miss <= EXPLAINED:
            return (self._whole,)
        left, groups = self._all, []
        for place in self._all if len(self.sources) < NUMBERS else ():  # else each is explained by itself
            own = self._solve([place])
            if place in left and own.residual <= EXPLAINED and not own.alike:
                misses = self._misses(own, left).max(1)
                groups.append(self._solve([it for it, miss in zip(left, misses, strict=True) if miss <= EXPLAINED]))
                left = [it for it, miss in zip(left, misses, strict=True) if miss > EXPLAINED]
        groups += [self._solve(left)] if left else []
        return tuple(sorted(groups, key=lambda group: -len(group.params)))

    def _misses(self, group: Group, places: Sequence[int]) -> Any:
        """[parameters, observers], relative to `.grad`, or to the columns where that is zero."""
        finals, found = self._finals[places], self._columns[places] @ np.nan_to_num(group.weights).T
        size = np.sqrt((finals**2).sum(1))
        return np.sqrt(((finals - found) ** 2).sum(1)) / np.where(size > 1e-6, size, 1.0)

    def _solve(self, places: Sequence[int]) -> Group:
        rows = self._columns[places].reshape(-1, len(self.sources))
        finals = self._finals[places].reshape(len(rows), -1)
        sizes = np.sqrt((rows**2).sum(0))
        scaled = rows / np.maximum(sizes, TINY)
        inverse = np.linalg.pinv(scaled, rcond=DEPENDENT)
        seen = (inverse * scaled.T).sum(1)  # of each source: how much of it is in directions that can be seen
        inverse /= np.where(sizes, sizes, 1.0)[:, None]
        weights = (inverse @ finals).T
        spread = ((finals - rows @ weights.T) ** 2).sum(0) / max(1, len(rows) - len(sizes))
        errors = np.sqrt(spread[:, None] * (inverse**2).sum(1))
        is_alike = ((seen < 0.999) | (5 * errors > CLOSE * np.abs(weights).max(initial=0)).any(0)) & (sizes > 0)
        alike = tuple(self.sources[place] for place in np.flatnonzero(is_alike))
        is_old = np.array([source.ago > 0 for source in self.sources])
        old, new = (np.linalg.norm(rows[:, part] @ weights[:, part].T, axis=0).max() for part in (is_old, ~is_old))
        weights[:, sizes == 0] = np.nan
        group = Group(tuple(self.params[i] for i in places), weights, 0.0, old / max(old + new, TINY), alike)
        return group._replace(residual=float(np.sqrt((self._misses(group, places) ** 2).mean(0)).max()))
