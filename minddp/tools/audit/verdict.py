"""From weights to a verdict, in a sentence. Pure.

A gradient is right if all elements (tokens) count alike: the share of a micro-batch is that of its elements.
Weights are those of gradients as backward has made them, so the factor of the loss belongs to a share. How much of
it is a part of averaging is not always known (see `loss.py`): a script is right if one way to read it makes it so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minddp.platform import wording
from minddp.tools.audit.loss import Loss
from minddp.tools.audit.weights import TINY, AuditedStep, Group

CLOSE = 0.02  # relative; weights are measured more exactly than that
FACTORS: tuple[Callable[[Loss], float], ...] = (lambda it: it.whole_factor, lambda it: it.factor)


class Verdict(NamedTuple):
    """`kind` is a word for the sentence. A verdict that is no fault is right, or says what cannot be told."""

    kind: str
    is_fault: bool
    text: str


class Judge:
    """Judges one group of parameters in one step. Arrays have an entry for each micro-batch of each rank."""

    def __init__(self, step: AuditedStep, group: Group, names: Sequence[str]):
        self.step, self.group = step, group
        is_there = np.isfinite(group.errors).all(0)
        places = [place for place, source in enumerate(step.sources) if source.ago == 0 and is_there[place]]
        self.rank, self.number = np.array([step.sources[place][:2] for place in places]).T
        self.ranks, self.per_rank = int(self.rank.max()) + 1, int(self.number.max()) + 1
        batches = [step.batches[step.sources[place]] for place in places]
        self._losses, self._line = [batch.loss for batch in batches], batches[0].line
        counts = np.array([batch.weight or batch.loss.elements for batch in batches], float)
        self.expected = counts / sum(batch.weight or batch.loss.elements for batch in step.batches.values())
        # [observers, micro-batches]; a weight within its slack is zero
        self._weights = group.weights[:, places]
        self._slack = CLOSE * np.abs(self._weights).max(initial=0) + 5 * group.errors[:, places]
        total, whose = sum(len(one.params) for one in step.groups), wording.names([names[i] for i in group.params])
        self.of = f" of {len(group.params)} of {total} parameters ({whose})" if len(step.groups) > 1 else ""

    def verdict(self) -> Verdict:
        """The first that is wrong."""
        residual, earlier = self.group.residual, self.group.earlier
        if residual > CLOSE:
            text = f"{residual:.0%} of the gradient{self.of} is explained by no micro-batch: compression, or noise."
            return Verdict("unexplained", False, text)
        if earlier > CLOSE:
            return Verdict("earlier", True, f"{earlier:.0%} of the gradient{self.of} comes from an earlier step.")
        if self.step.same or self.group.alike:
            who = wording.ranks(sorted({source.rank for source in self.step.same or self.group.alike})).capitalize()
            why = (
                "have equal gradients: equal data."
                if self.step.same
                else "have gradients that depend on each other."
            )
            text = f"{who} {why} Their weights{self.of} cannot be told apart."
            return Verdict("same data" if self.step.same else "dependent", bool(self.step.same), text)
        if found := self.missing() or self.unequal():
            text = found[1].replace("gradient", f"gradient{self.of}", 1)
            return Verdict(found[0], True, f"{text[0].upper()}{text[1:]} (backward at {self._line}).")
        kind, is_fault, text = self.scale()
        return Verdict(
            kind, is_fault, f"{text.replace(' gradient', f' gradient{self.of}', 1)}, residual {residual:.0e}."
        )

    def shares(self, factor_of: Callable[[Loss], float], *, of_sums: bool = True) -> Any:
        """The weights of the micro-batches' mean losses; `of_sums=False` takes a sum for a loss without a size."""
        sizes = [loss.elements if loss.reduction == "sum" and of_sums else 1 for loss in self._losses]
        return self._weights * [factor_of(loss) * size for loss, size in zip(self._losses, sizes, strict=True)]

    def readings(self) -> list[Any]:
        """The shares, which should add up to 1, by each way to read the losses."""
        kinds = {loss.reduction for loss in self._losses}
        found = [self.shares(factor) for factor in FACTORS if "" not in kinds]
        if kinds != {"mean"}:
            own = [self.shares(factor, of_sums=False) for factor in (*FACTORS, lambda it: 1.0)]
            found += [*own, own[2] / self.per_rank]

        def order(shares: Any) -> int:
            """Those that are right first, then those that are right but for a factor."""
            total, fits = self.total(shares), self.is_equal(shares / self.expected)
            return 0 if fits and abs(total - 1) <= CLOSE else 1 if fits and 0.5 < total < 2 else 2

        return sorted(found, key=order)

    def is_equal(self, values: Any) -> bool:
        """The micro-batches have equal values, in each gradient."""
        size, relative = np.abs(values), self._slack / np.maximum(np.abs(self._weights), TINY)
        return bool(((size * (1 - relative)).max(1) <= (size * (1 + relative)).min(1) * (1 + CLOSE)).all())

    def total(self, shares: Any) -> float:
        return float(shares.sum(1).mean() / self.expected.sum())

    def numbered(self, numbers: Sequence[int]) -> str:
        listed = wording.ranks([number + 1 for number in numbers]).partition(" ")[2]
        return f"micro-batch{'es' if len(numbers) > 1 else ''} {listed} of {self.per_rank}"

    def name(self, place: int) -> str:
        return f"{self.numbered([self.number[place]])} of rank {self.rank[place]}"

    def missing(self) -> tuple[str, str] | None:
        """Micro-batches of weight 0: in all gradients, or in one rank's."""
        zero = np.abs(self._weights) <= self._slack
        where = [("lost", "no gradient contains", zero.all(0), self.rank < 0)]
        for observer, absent in zip(self.step.observers, zero, strict=True):
            where.append(("not averaged", f"rank {observer}'s gradient lacks", absent, self.rank == observer))
        for kind, whose, absent, own in where:
            ranks = [rank for rank in range(self.ranks) if absent[self.rank == rank].all()]
            numbers = [one for one in range(self.per_rank) if (absent | own)[self.number == one].all()]
            if ranks:
                return kind, f"{whose} the micro-batches of {wording.ranks(ranks)}: {kind}"
            if numbers:
                return kind, f"{whose} {self.numbered(numbers)} of {'other' if own.any() else 'all'} ranks: {kind}"
            if absent.any():
                return kind, f"{whose} {self.name(absent.argmax())}: {kind}"
        return None

    def unequal(self) -> tuple[str, str] | None:
        """Micro-batches of which one counts more than another, in the gradient in which they differ most."""
        readings = [self.shares(factor) / self.expected for factor in FACTORS]
        if any(map(self.is_equal, readings)):
            return None
        each, names = readings[0], [self.name(place) for place in range(len(self.rank))]
        row = (each.max(1) / each.min(1)).argmax()
        most, least = each[row].argmax(), each[row].argmin()
        times = f"counts {each[row][most] / each[row][least]:.2g} times as much as"
        clips = np.array([np.prod([clip.factor for clip in clips]) for clips in self.step.clips])
        if clips.min() < 1 and self.is_equal(each / clips[self.rank]):
            listed = wording.joined([f"{clip:.2g}" for clip in clips])
            text = f"the ranks' gradients are clipped before they are averaged, by {listed}"
            return "clipped early", f"{text}, at {self.step.clips[clips.argmin()][0].line}"
        if self.is_equal(each / np.bincount(self.number, each.mean(0))[self.number]):
            names = [self.numbered([number]) for number in self.number]
        elif self.is_equal(each / np.bincount(self.rank, each.mean(0))[self.rank]):
            names = [f"rank {rank}" for rank in self.rank]
        whose = (
            "the gradient"
            if np.allclose(each, each[:1], rtol=CLOSE)
            else f"rank {self.step.observers[row]}'s gradient"
        )
        if np.ptp(self.expected) <= CLOSE * self.expected.max():
            return "unequal", f"{names[most]} {times} {names[least]} in {whose}"
        what = "token" if any(loss.of_tokens for loss in self._losses) else "element"
        return "tokens", f"each {what} of {names[most]} {times} one of {names[least]} in {whose}"

    def scale(self) -> tuple[str, bool, str]:
        """All micro-batches count alike: how much?"""
        totals = [self.total(shares) for shares in self.readings()]
        n, k = float(self.ranks), float(self.per_rank)
        clip = float(np.prod([one.factor for one in self.step.clips[0]]))
        is_mean_of_ranks = abs(self._weights.sum(1).mean() / k / clip - 1) <= CLOSE
        mistakes: dict[str, float] = {} if is_mean_of_ranks else {f"the sum over {n:g} ranks": n}
        mistakes |= {
            f"divided by {n:g} twice, the number of ranks": 1 / n,
            f"the sum over {k:g} micro-batches": k,
            f"divided by {k:g} twice, the number of micro-batches": 1 / k,
            f"the sum over {n:g} ranks and {k:g} micro-batches": n * k,
            f"divided by {n * k:g} twice": 1 / n / k,
        }

        def is_near(factor: float) -> bool:
            return any(abs(total / factor - 1) <= CLOSE for total in totals)

        if is_near(1.0):
            same = np.ptp(self.expected) <= CLOSE * self.expected.max()
            how = f"1/{n * k:g}" if same else "by its number of elements"
            return "right", False, f"Right: each counts {how} in the gradient"
        if is_near(clip):
            text = f"Right, the gradient is scaled by {clip:.2g} after averaging on all ranks alike: clipping"
            return "clipped", False, f"{text}, at {self.step.clips[0][0].line}"
        for what, factor in mistakes.items():
            if is_near(factor * clip):
                return "scaled", True, f"The gradient is {what}, instead of the mean (backward at {self._line})"
        return (
            "scaled",
            False,
            f"All count alike, the gradient is {totals[0]:.3g} times the mean on all ranks; why was not seen",
        )
