"""From weights to a verdict, in a sentence. Pure.

A gradient is right if all elements (tokens) count alike: each micro-batch has the share that its elements are of all.
Weights are measured of gradients as backward has made them, so the factor of the loss belongs to a share. Which part of
it is a part of the averaging is not always known (see `loss.py`), so a share is computed with each of several factors; a
script is right if it is right with one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from minddp.platform import wording
from minddp.tools.audit.loss import Loss
from minddp.tools.audit.recorder import MicroBatch
from minddp.tools.audit.weights import AuditedStep, Group

CLOSE = 0.02  # relative; weights are measured more exactly than that
NOTABLE = 0.02  # a share of the gradient
FACTORS: tuple[Callable[[Loss], float], ...] = (
    lambda loss: loss.whole_factor,
    lambda loss: loss.factor,
    lambda loss: 1.0,
)


class Verdict(NamedTuple):
    """`kind` is a word of the sentences below. A verdict that is no fault is right, or says what cannot be told."""

    kind: str
    is_fault: bool
    text: str


@dataclass(frozen=True)
class Measured:
    """The micro-batches of a step, and their weights in the gradient of each observer, [observers, micro-batches]."""

    batches: Sequence[MicroBatch]
    rank: Any  # of each micro-batch
    number: Any  # within its rank
    observers: Sequence[int]
    weights: Any
    slack: Any  # a weight within it is zero; a difference within it is none
    clips: Sequence[Any]  # of each rank

    @classmethod
    def of(cls, step: AuditedStep, group: Group) -> Measured:
        places = [place for place, source in enumerate(step.sources) if source.ago == 0]
        sources = [step.sources[place] for place in places]
        weights, errors = group.weights[:, places], group.errors[:, places]
        slack = CLOSE * np.abs(weights).max(initial=0) + 5 * errors
        rank, number = (np.array([source[i] for source in sources]) for i in (0, 1))
        batches = [step.batches[source] for source in sources]
        return cls(batches, rank, number, step.observers, weights, slack, step.clips)

    @property
    def num_ranks(self) -> int:
        return int(self.rank.max()) + 1

    @property
    def per_rank(self) -> int:
        return int(self.number.max()) + 1

    @property
    def expected(self) -> Any:
        """The share that each micro-batch should have."""
        own = [one.loss.elements if one.weight is None else one.weight for one in self.batches]
        return np.array(own) / sum(own)

    def shares(self, factor_of: Callable[[Loss], float], *, of_sums: bool = True) -> Any:
        """The weights of the micro-batches' mean losses; `of_sums=False` takes a sum for a loss without a size."""
        sizes = [one.loss.elements if one.loss.reduction == "sum" and of_sums else 1 for one in self.batches]
        return self.weights * [factor_of(one.loss) * size for one, size in zip(self.batches, sizes, strict=True)]

    def best_shares(self) -> Any:
        """The shares by the factor with which they are nearest to a sum of 1."""
        return min(map(self.shares, FACTORS), key=lambda shares: abs(np.log(abs(shares.sum(1).mean()) + 1e-30)))

    def name(self, place: int) -> str:
        return f"rank {self.rank[place]}'s {self.numbered([self.number[place]])}"

    def numbered(self, numbers: Sequence[int]) -> str:
        listed = wording.ranks([int(number) + 1 for number in numbers]).partition(" ")[2]
        return f"micro-batch{'es' if len(numbers) > 1 else ''} {listed} of {self.per_rank}"


def judge(step: AuditedStep, group: Group, names: Sequence[str], num_params: int) -> Verdict:
    """The first that is wrong with one group of parameters in one step."""
    whose = wording.names([names[index] for index in group.params])
    where = "" if len(group.params) == num_params else f" of {len(group.params)} of {num_params} parameters ({whose})"
    measured = Measured.of(step, group)
    if group.residual.max() > 0.5:
        return Verdict("unexplained", False, f"No micro-batch explains {group.residual.max():.0%} of the gradient{where}.")
    if group.earlier.max() > NOTABLE:
        return Verdict("earlier", True, f"{group.earlier.max():.0%} of the gradient{where} comes from an earlier step.")
    if step.same:
        return Verdict("same data", True, f"{same_data(step.same, measured)} Their weights cannot be told apart.")
    if group.alike:
        ranks = sorted({source.rank for source in group.alike})
        text = f"The gradients of {wording.ranks(ranks)} depend on each other{where}: their weights cannot be told apart."
        return Verdict("dependent", False, text)
    for kind, text in (*missing(measured), *unequal(measured)):
        return Verdict(kind, True, f"{text[0].upper()}{text[1:]}".replace(" gradient", f" gradient{where}", 1))
    kind, is_fault, text = scale(measured)
    residual = group.residual.max()
    rest = f"{residual:.0%} of it is explained by no micro-batch (compression, noise)" if residual > NOTABLE else ""
    return Verdict(kind, is_fault, f"{text}{where}; {rest or f'residual {residual:.0e}'}.")


def same_data(same: Sequence[Any], measured: Measured) -> str:
    ranks = wording.ranks(sorted({source.rank for source in same})).capitalize()
    return f"{ranks} have equal gradients in {measured.numbered(sorted({source.batch for source in same}))}: equal data."


def missing(measured: Measured) -> Iterator[tuple[str, str]]:
    """Micro-batches whose weight is zero."""
    zero, rank, number = np.abs(measured.weights) <= measured.slack, measured.rank, measured.number
    lost, ranks, numbers = zero.all(0), range(measured.num_ranks), range(measured.per_rank)
    if lost.all():
        yield "lost", "all micro-batches count 0 in the gradient"
    if lost_numbers := [one for one in numbers if lost[number == one].all()]:
        verb = "are" if len(lost_numbers) > 1 else "is"
        yield "lost", f"{measured.numbered(lost_numbers)} {verb} lost: 0 in the gradient"
    if lost_ranks := [one for one in ranks if lost[rank == one].all()]:
        yield "lost", f"{wording.ranks(lost_ranks)} count{'s' * (len(lost_ranks) == 1)} 0 in every rank's gradient"
    for place in np.flatnonzero(lost):
        yield "lost", f"{measured.name(place)} is lost: 0 in the gradient"
    for row, observer in enumerate(measured.observers):
        if absent := [one for one in ranks if zero[row, rank == one].all()]:
            verb = f"{wording.ranks(absent)} count{'s' * (len(absent) == 1)} 0"
            yield "not averaged", f"{verb} in rank {observer}'s gradient: they are never averaged"
    others = np.array(measured.observers)[:, None] != rank
    if local := [one for one in numbers if (zero | ~others | (number != one)).all()]:
        yield "not averaged", f"{measured.numbered(local)} count 0 in other ranks' gradient: not averaged"
    for row, place in zip(*np.nonzero(zero), strict=True):
        yield "not averaged", f"{measured.name(place)} counts 0 in rank {measured.observers[row]}'s gradient"


def unequal(measured: Measured) -> Iterator[tuple[str, str]]:
    """Micro-batches of which one counts more than another."""
    expected, rank, number = measured.expected, measured.rank, measured.number
    relative = measured.slack / np.abs(measured.weights)

    def spread(values: Any) -> float:
        """How far values differ in one gradient, beyond the slack."""
        size = np.abs(values)
        return float(((size * (1 - relative)).max(1) / (size * (1 + relative)).min(1)).max() - 1)

    shares = [measured.shares(factor) for factor in FACTORS]
    if min(spread(share / expected) for share in shares) <= CLOSE:
        return
    share = min(shares, key=lambda share: spread(share))
    each = share / expected
    most, least = each.mean(0).argmax(), each.mean(0).argmin()
    times = f"{each.mean(0)[most] / each.mean(0)[least]:.2g} times"
    if spread(share) <= CLOSE:
        what = "token" if any(one.loss.counts_targets for one in measured.batches) else "element"
        who = [f"rank {rank[place]}" if rank[most] != rank[least] else measured.name(place) for place in (most, least)]
        yield "tokens", f"each {what} of {who[0]} counts {times} as much as one of {who[1]} in the gradient"
        return
    each = share if spread(share / expected) > spread(share) else each
    clips = [np.prod([clip.factor for clip in clips]) for clips in measured.clips]
    if min(clips) < 1 and spread(each / np.array(clips)[rank]) <= CLOSE:
        line = next(clip.line for clips in measured.clips for clip in clips)
        factors = ", ".join(f"{factor:.2g} on rank {one}" for one, factor in enumerate(clips))
        yield "clipped early", f"each rank's gradient is clipped before it is averaged ({factors}), at {line}"
        return
    by_number = [each[:, number == one].mean() for one in range(measured.per_rank)]
    by_rank = [each[:, rank == one].mean() for one in range(measured.num_ranks)]
    if spread(each / np.array(by_number)[number]) <= CLOSE:
        most, least = int(np.argmax(by_number)), int(np.argmin(by_number))
        ratio = by_number[most] / by_number[least]
        yield "unequal", f"{measured.numbered([most])} counts {ratio:.2g} times as much as {least + 1} in the gradient"
    elif spread(each / np.array(by_rank)[rank]) <= CLOSE:
        most, least = int(np.argmax(by_rank)), int(np.argmin(by_rank))
        ratio = by_rank[most] / by_rank[least]
        yield "unequal", f"rank {most} counts {ratio:.2g} times as much as rank {least} in the gradient"
    else:
        row = int((each.max(1) / each.min(1)).argmax())
        most, least = each[row].argmax(), each[row].argmin()
        ratio = each[row][most] / each[row][least]
        whose = f"rank {measured.observers[row]}'s " * (len(measured.observers) > 1)
        text = f"{measured.name(most)} counts {ratio:.2g} times as much as {measured.name(least)}"
        yield "unequal", f"{text} in {whose or 'the '}gradient"


def totals(measured: Measured) -> list[float]:
    """The sum of all shares, which should be 1, by each way to read the losses."""
    whole = [measured.shares(factor).sum(1).mean() for factor in FACTORS[:2]]
    if all(one.loss.reduction == "mean" for one in measured.batches):
        return whole
    own = [measured.shares(factor, of_sums=False).sum(1).mean() for factor in FACTORS]
    is_sum = any(one.loss.reduction == "sum" for one in measured.batches)
    return [*(whole if is_sum else []), *own, own[2] / measured.per_rank]


def scale(measured: Measured) -> tuple[str, bool, str]:
    """All micro-batches count alike: how much?"""
    ranks, batches, found = measured.num_ranks, measured.per_rank, totals(measured)
    clip = float(np.prod([one.factor for one in measured.clips[0]]))

    def first_near(factor: float) -> float | None:
        return next((total for total in found if abs(total / factor - 1) <= CLOSE), None)

    if first_near(1.0) is not None:
        same = np.ptp(measured.expected) <= CLOSE * measured.expected.max()
        return "right", False, f"Right: each counts {f'1/{ranks * batches}' if same else 'by its number of elements'}"
    if first_near(clip) is not None:
        text = f"Right: each counts alike, scaled by {clip:.2g} after averaging on all ranks alike: clipping"
        return "clipped", False, f"{text}, at {measured.clips[0][0].line}"
    for (a, of_ranks), (b, of_batches) in sorted(product(POWERS, POWERS), key=lambda pair: abs(pair[0][0]) + abs(pair[1][0])):
        if (a or b) and first_near(ranks**a * batches**b * clip) is not None:
            words = [of_ranks.format(ranks, "ranks"), of_batches.format(batches, "micro-batches")]
            chosen = words[: 1 if ranks**a * batches**b == ranks**a else 2] if a else words[1:]
            return "scaled", True, f"The gradient is {wording.joined([word for word in chosen if word])}, not the mean"
    text = f"All count alike, scaled by {found[0]:.3g} on all ranks alike, by no clipping that was seen"
    return "scaled", False, text


POWERS = ((0, ""), (1, "the sum over {} {}"), (-1, "divided by {} twice, the number of {}"), (2, "multiplied by {} twice"))
