"""From weights to a report: verdicts in a sentence each, and tables, in the terminal and as a page.

A gradient is right if all elements (tokens) count alike: the share of a micro-batch is that of its elements.
Weights are those of gradients as backward has made them, so the factor of the loss belongs to a share. How much of
it is a part of averaging is not always known (see `loss.py`): a script is right if one way to read it makes it so.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from minddp.platform import wording
from minddp.tools.audit.weights import CLOSE, AuditedStep, GradientPart, Group

EQUAL = 1e-4  # relative, of gradients

#: Rich fills in the rest. Lines wrap on a narrow screen.
PAGE = (
    '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Audit</title>'
    "<style>{stylesheet} body {{ color: {foreground}; background: {background}; }} pre {{ white-space: pre-wrap; }}"
    "</style><pre><code>{code}</code></pre>"
)


class Verdict(NamedTuple):
    """`kind` is a word for the sentence. A verdict that is no fault is right, or says what cannot be told."""

    kind: str
    is_fault: bool
    text: str


class Judge:
    """Judges one group of parameters in one step. Arrays have an entry for each micro-batch of each rank."""

    def __init__(self, step: AuditedStep, group: Group, names: Sequence[str]):
        self.step, self.group = step, group
        now = [place for place, source in enumerate(step.sources) if source.ago == 0]
        places = [place for place in now if np.isfinite(group.weights[:, place]).all()] or now
        self.rank, self.number = np.array([step.sources[place][:2] for place in places]).T
        self.per_rank = max(step.sources[place].number for place in now) + 1
        batches = {place: step.sources[place].batch for place in now}
        losses, self._at = [batches[place].loss for place in places], f"(backward at {batches[places[0]].line})"
        counts = np.array([loss.elements for loss in losses], float)
        self._counts_are_equal = np.ptp(counts) <= CLOSE * counts.max()
        self.expected = counts / sum(batch.loss.elements for batch in batches.values())
        self._weights = np.nan_to_num(group.weights[:, places])  # [observers, micro-batches]
        # The shares, which should add up to 1, by each way to read the losses; first one by which all is right
        factors = [loss.whole_factor for loss in losses], [loss.factor for loss in losses]
        readings = [self._weights * of_losses for of_losses in factors]
        if not all(loss.is_mean for loss in losses):  # the sum of shares is judged as if each loss were a mean
            scale = self._weights.mean() * len(step.clips) / (self._total(readings[0]) or 1.0)
            readings.append(readings[0] * scale)
        self._readings = sorted(readings, key=lambda it: (not self._is_fair(it), abs(self._total(it) - 1) > CLOSE))
        self.shares = self._readings[0]
        total, whose = sum(len(one.params) for one in step.groups), wording.names([names[i] for i in group.params])
        self.of = f" of {len(group.params)} of {total} parameters ({whose})" if len(step.groups) > 1 else ""

    def verdict(self) -> Verdict:
        """The first that is wrong."""
        residual, earlier, alike = self.group.residual, self.group.earlier, self.group.alike
        if residual > CLOSE:
            text = f"{residual:.0%} of the gradient is explained by no micro-batch: compression, or noise"
            found = Verdict("unexplained", False, text)
        elif earlier > CLOSE:
            found = Verdict("earlier", True, f"{earlier:.0%} of the gradient comes from an earlier step")
        elif alike:
            same = [a for a in alike for b in alike if a.rank != b.rank and self._are_equal(a, b)]
            kind, how = ("same data", "are equal: equal data") if same else ("dependent", "depend on each other")
            who = wording.ranks(sorted({source.rank for source in same or alike}))
            found = Verdict(kind, bool(same), f"Gradients of {who} {how}. Their weights cannot be told apart")
        else:
            found = self._missing() or self._unequal() or self._scaled()
        text = found.text.replace("gradient", f"gradient{self.of}", 1)
        return found._replace(text=f"{text[0].upper()}{text[1:]}.")

    def _are_equal(self, *sources: GradientPart) -> bool:
        a, b = (it.batch.sketches if it.ago == 0 else np.nan for it in sources)
        return bool(np.linalg.norm(a - b) <= EQUAL * np.linalg.norm(a))

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
        where += [("not averaged", f"Rank {rank}'s gradient lacks", absent) for rank, absent in enumerate(zero)]
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
        worst = each[(each.max(1) / each.min(1)).argmax()]
        places = [worst.argmax(), worst.argmin()]
        most, least = (self._name([place]) for place in places)
        if self._is_fair(self.shares / np.bincount(self.rank, each.mean(0))[self.rank]):
            most, least = (f"rank {self.rank[place]}" for place in places)
        times = f"counts {worst.max() / worst.min():.2g} times as much as"
        if self._counts_are_equal:
            return Verdict("unequal", True, f"{most} {times} {least} in the gradient {self._at}")
        return Verdict("tokens", True, f"Each element of {most} {times} one of {least} in the gradient {self._at}")

    def _scaled(self) -> Verdict:
        """All elements count alike: how much?"""
        n, k = len(self.step.clips), self.per_rank
        clip = float(np.prod([one.factor for one in self.step.clips[0]]))

        def is_near(factor: float) -> bool:
            return any(abs(self._total(shares) / factor - 1) <= CLOSE for shares in self._readings)

        residual = f", residual {self.group.residual:.0e}"
        if is_near(1.0):
            how = f"1/{n * k}" if self._counts_are_equal else "by its number of elements"
            return Verdict("right", False, f"Right: each counts {how} in the gradient{residual}")
        if is_near(clip):
            text = f"Right, the gradient is scaled by {clip:.2g} after averaging on all ranks alike: clipping"
            return Verdict("clipped", False, f"{text}, at {self.step.clips[0][0].line}{residual}")
        counts = ((n, "ranks"), (k, "micro-batches"), *([(n * k, "micro-batches of all ranks")] if k > 1 else ()))
        mistakes = [f"the sum over {count} {of}" for count, of in counts if is_near(count * clip)]
        mistakes += [
            f"divided by {count} twice, the number of {of}" for count, of in counts if is_near(clip / count)
        ]
        seen = f"{' or '.join(mistakes)}, instead of the mean"
        unseen = f"{self._total(self.shares):.3g} times the mean, for a reason that was not seen"
        text = f"The gradient is {seen if mistakes else unseen} {self._at}{residual}"
        return Verdict("scaled", bool(mistakes), text)


class Report(NamedTuple):
    """`steps` of all ranks, of parameters with these `names`."""

    names: Sequence[str]
    steps: Sequence[AuditedStep]
    notes: Sequence[str] = ()

    def verdicts(self) -> list[Verdict]:
        """One of each kind: faults first, then what cannot be told."""
        if not self.steps:
            return [Verdict("no step", False, "No step could be audited.")]
        found = [Judge(step, group, self.names).verdict() for step in self.steps for group in step.groups]
        first = {verdict.kind: verdict for verdict in reversed(found)}
        return sorted(first.values(), key=lambda it: (not it.is_fault, it.kind == "right"))

    def tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """The shares in the first step, for each group of parameters: a title, and rows of a rank each."""
        for group in self.steps[0].groups if self.steps else ():
            judge = Judge(self.steps[0], group, self.names)
            whose = "every rank" if np.allclose(judge.shares, judge.shares[0], rtol=CLOSE) else "rank 0"
            rows = [["micro-batch", *(str(number + 1) for number in range(judge.per_rank))]]
            for rank in np.unique(judge.rank):
                pairs = zip(judge.shares[0, judge.rank == rank], judge.expected[judge.rank == rank], strict=True)
                rows.append([f"rank {rank}", *(f"{round(it, 4) + 0.0:.4g} / {due:.4g}" for it, due in pairs)])
            yield f"Shares in {whose}'s gradient{judge.of}, and what they should be", rows

    def explain(self, console: Console | None = None) -> None:
        """Print verdicts and shares."""
        console = console or Console(highlight=False)
        for verdict in self.verdicts():
            console.print(verdict.text, style="bold red" if verdict.is_fault else "bold", markup=False)
        for title, (head, *rows) in self.tables():
            table = Table(*head, box=None)
            for row in rows:
                table.add_row(*row)
            console.print(f"\n{title}", table, sep="\n")
        console.print(*self.notes, markup=False)

    def save(self, path: str | Path) -> None:
        """Write the same as a page."""
        console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
        self.explain(console)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        console.save_html(str(path), code_format=PAGE)
