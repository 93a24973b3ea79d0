"""From weights to a verdict, in a sentence. Pure.

A gradient is right if all elements (tokens) count alike: the share of a micro-batch is that of its elements.
Weights are those of gradients as backward has made them, so the factor of the loss belongs to a share. How much of
it is a part of averaging is not always known (see `loss.py`): a script is right if one way to read it makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minddp.platform import wording
from minddp.tools.audit.weights import AuditedStep, Contribution, Group

CLOSE = 0.02  # relative; weights are measured more exactly than that


class Verdict(NamedTuple):
    """`kind` is a word for the sentence. A verdict that is no fault is right, or says what cannot be told."""

    kind: str
    is_fault: bool
    text: str


class Judge:
    """Judges one group of parameters in one step. Arrays have an entry for each micro-batch of each rank."""

    def __init__(self, step: AuditedStep, group: Group, names: Sequence[str]):
        self.step, self.group = step, group
        is_there = np.isfinite(group.weights).all(0)
        places = [place for place, source in enumerate(step.sources) if source.ago == 0 and is_there[place]]
        self.rank, self.number = np.array([step.sources[place][:2] for place in places]).T
        self.per_rank = max(source.batch for source in step.batches) + 1
        batches = [step.batches[step.sources[place]] for place in places]
        losses, self._at = [batch.loss for batch in batches], f"(backward at {batches[0].line})"
        counts = np.array([batch.weight or batch.loss.elements for batch in batches], float)
        self.expected = counts / sum(batch.weight or batch.loss.elements for batch in step.batches.values())
        self._weights = group.weights[:, places]  # [observers, micro-batches]
        # The shares, which should add up to 1, by each way to read the losses; first one by which all is right
        readings = [
            self._weights * [it.whole_factor for it in losses],
            self._weights * [it.factor for it in losses],
        ]
        if not all(loss.is_mean for loss in losses):  # the sum of shares is judged as if each loss were a mean
            scale = self._weights.mean() * len(step.clips) / (self._total(readings[0]) or 1.0)
            readings.append(readings[0] * scale)
        self._readings = sorted(readings, key=lambda it: (not self._is_fair(it), abs(self._total(it) - 1) > CLOSE))
        self.shares = self._readings[0]
        total, whose = sum(len(one.params) for one in step.groups), wording.names([names[i] for i in group.params])
        self.of = f" of {len(group.params)} of {total} parameters ({whose})" if len(step.groups) > 1 else ""

    def verdict(self) -> Verdict:
        """The first that is wrong."""
        residual, earlier, same = self.group.residual, self.group.earlier, self.step.same
        if residual > CLOSE:
            text = f"{residual:.0%} of the gradient is explained by no micro-batch: compression, or noise"
            found = Verdict("unexplained", False, text)
        elif earlier > CLOSE:
            found = Verdict("earlier", True, f"{earlier:.0%} of the gradient comes from an earlier step")
        elif same:
            text = f"{ranks_of(same)} have equal gradients: equal data. Their weights cannot be told apart"
            found = Verdict("same data", True, text)
        elif self.group.alike:
            text = f"Gradients of {ranks_of(self.group.alike)} depend on each other: weights cannot be told apart"
            found = Verdict("dependent", False, text)
        else:
            found = self._missing() or self._unequal() or self._scaled()
        text = found.text.replace("gradient", f"gradient{self.of}", 1)
        return found._replace(text=f"{text[0].upper()}{text[1:]}.")

    def _total(self, shares: Any) -> float:
        return float(shares.sum(1).mean() / self.expected.sum())

    def _is_fair(self, shares: Any) -> bool:
        """All elements count alike, in each gradient."""
        each = shares / self.expected
        return bool((np.ptp(each, axis=1) <= 2 * CLOSE * np.abs(each).max(1)).all())

    def _name(self, chosen: Any) -> str:
        numbers = wording.ranks(np.unique(self.number[chosen] + 1).tolist()).removeprefix("rank")
        return f"micro-batch{numbers} of {self.per_rank} of {wording.ranks(np.unique(self.rank[chosen]).tolist())}"

    def _missing(self) -> Verdict | None:
        """Micro-batches of weight 0: in all gradients, or in one rank's."""
        zero = np.abs(self._weights) <= CLOSE * np.abs(self._weights).max(initial=0)
        where = [("lost", "No gradient contains", zero.all(0))]
        for observer, absent in enumerate(zero):
            where.append(("not averaged", f"Rank {observer}'s gradient lacks", absent))
        for kind, whose, absent in where:
            ranks = [rank for rank in np.unique(self.rank).tolist() if absent[self.rank == rank].all()]
            if absent.any():
                what = f"the micro-batches of {wording.ranks(ranks)}" if ranks else self._name(absent)
                return Verdict(kind, True, f"{whose} {what}: {kind} {self._at}")
        return None

    def _unequal(self) -> Verdict | None:
        """Micro-batches of which one counts more than another, in the gradient in which they differ most."""
        if self._is_fair(self.shares):
            return None
        clips = np.array([np.prod([clip.factor for clip in clips]) for clips in self.step.clips])
        if self._is_fair(self.shares / clips[self.rank]):
            listed = wording.joined([f"{clip:.2g}" for clip in clips])
            text = f"The ranks' gradients are clipped before they are averaged, by {listed}"
            return Verdict("clipped early", True, f"{text}, at {self.step.clips[clips.argmin()][0].line}")
        each = self.shares / self.expected
        row = (each.max(1) / each.min(1)).argmax()
        most, least = each[row].argmax(), each[row].argmin()
        names = [self._name([place]) for place in (most, least)]
        if self._is_fair(self.shares / np.bincount(self.rank, each.mean(0))[self.rank]):
            names = [f"rank {self.rank[place]}" for place in (most, least)]
        whose = "the" if np.allclose(each, each[:1], rtol=CLOSE) else f"rank {row}'s"
        times = f"counts {each[row][most] / each[row][least]:.2g} times as much as"
        if self._has_equal_counts():
            return Verdict("unequal", True, f"{names[0]} {times} {names[1]} in {whose} gradient {self._at}")
        text = f"Each element of {names[0]} {times} one of {names[1]} in {whose} gradient {self._at}"
        return Verdict("tokens", True, text)

    def _scaled(self) -> Verdict:
        """All elements count alike: how much?"""
        n, k = len(self.step.clips), self.per_rank
        clip = float(np.prod([one.factor for one in self.step.clips[0]]))

        def is_near(factor: float) -> bool:
            return any(abs(self._total(shares) / factor - 1) <= CLOSE for shares in self._readings)

        residual = f", residual {self.group.residual:.0e}"
        if is_near(1.0):
            how = f"1/{n * k}" if self._has_equal_counts() else "by its number of elements"
            return Verdict("right", False, f"Right: each counts {how} in the gradient{residual}")
        if is_near(clip):
            text = f"Right, the gradient is scaled by {clip:.2g} after averaging on all ranks alike: clipping"
            return Verdict("clipped", False, f"{text}, at {self.step.clips[0][0].line}{residual}")
        counts = ((n, "ranks"), (k, "micro-batches"), *([(n * k, "micro-batches of all ranks")] if k > 1 else ()))
        mistakes = [f"the sum over {count} {what}" for count, what in counts if is_near(count * clip)]
        mistakes += [
            f"divided by {count} twice, the number of {what}" for count, what in counts if is_near(clip / count)
        ]
        if mistakes:
            text = f"The gradient is {' or '.join(mistakes)}, instead of the mean {self._at}{residual}"
            return Verdict("scaled", True, text)
        text = f"All count alike, the gradient is {self._total(self.shares):.3g} times the mean; why was not seen"
        return Verdict("scaled", False, text)

    def _has_equal_counts(self) -> bool:
        return bool(np.ptp(self.expected) <= CLOSE * self.expected.max())


def ranks_of(sources: Sequence[Contribution]) -> str:
    return wording.ranks(sorted({source.rank for source in sources}))
