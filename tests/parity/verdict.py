"""Plays a script on one rank with torch's wrapper, with minddp's and with none, and judges each line.

[Note: the verdict]
A line has two stages: what it does up to the end of its last backward, and the optimizer's step, if a synchronised
backward has run. After each stage:

1. Torch returns, minddp returns: on each rank they have the same bits in every `.grad`, parameter, buffer and
   output, and in every tensor that the script has kept.
2. Torch raises on some rank: minddp raises too, in this stage or at the latest in the next forward; or its
   gradients are the mean over the ranks of what the unwrapped model computes.
3. Torch returns, minddp raises: torch must raise in its next forward (minddp notices the same fault earlier).
4. Torch is silently wrong (it returns from a synchronised backward, but its gradients are not that mean, or differ
   between ranks): minddp may have the mean, or raise. Such scripts are counted apart.
5. Torch's gradients stay local, as those of a static graph do after `autograd.grad` or a backward for each of two
   heads: minddp must have the mean, or raise, although it would have the same bits.

Everything else is a failure, and so is a wait without end. An error of minddp is a RuntimeError, or of the type
that torch raises: any other would be an accident. A finding of the guard is a failure if the replicas were equal
after each line. (Some scripts make them differ, as torch does: a second backward for one forward is averaged by
neither.)

The unwrapped model, the *control*, takes over torch's parameters, gradients and buffers before each line, performs
it, and averages its gradients by a group of its own. All ranks share each verdict, so that they stay together.

[Note: after an error]
A script may go on after an error, as scripts do that catch it: the model returns to its straight route, gradients
are dropped, and torch gets a new wrapper, since its old one would raise in each forward. minddp keeps its own. From
then on buckets differ: from three ranks on sums may round in another order. minddp may end the script by an error
in any forward, as torch's old wrapper would; but after an exception of the script's own, it goes on.
Where gradients are views, torch's new buckets move once more. Scripts that go on then keep no gradients.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.parity.changes import CHANGES
from tests.parity.compare import different_notes, differing_sides, far, rounded_difference
from tests.parity.hooks import MEAN_HOOKS
from tests.parity.layers import kind_of
from tests.parity.script import DEVICE, Line, Script, acceleration_of
from tests.parity.side import SUBJECT, Side, Unwrapped, subject_of
from tests.transport.places import pretended_host

_LONGEST_LIST = 6  # mismatches reported per rank
_LONGEST_MESSAGE = 110


@dataclass
class Report:
    """One rank's report on a script.

    `failure` is the line that broke a rule, and how. `notes` are what the rules allow, but is worth counting:
    "both raise", "torch alone raises", "minddp raises early", "torch is silently wrong: ...". `states` are
    fingerprints of minddp's parameters after each line, `findings` what its guard has reported on this rank.
    """

    failure: str | None = None
    notes: list[str] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def play_script(rank: int, script: Script, subject: str, limit_s: float, traces: str) -> Report:
    """Play the script on this rank; all ranks of the default process group must do so together.

    A rank that has not finished after `limit_s` writes where it is to the file `traces`/rank, and may be killed.
    """
    with open(os.path.join(traces, str(rank)), "w") as file:
        faulthandler.dump_traceback_later(limit_s, file=file)
        try:
            return play(rank, script, subject)
        finally:
            faulthandler.cancel_dump_traceback_later()


def play(rank: int, script: Script, subject: str = SUBJECT) -> Report:
    """The same without a limit."""
    with warnings.catch_warnings(), acceleration_of(script), pretended_host("ab"[2 * rank // script.world_size]):
        warnings.simplefilter("ignore")
        return _Play(rank, script, subject).play()


class _Over(Exception):
    """The script ends here, without a failure."""


class _Failed(Exception):
    """A rule is broken."""


class _Play:
    def __init__(self, rank: int, script: Script, subject: str):
        self.rank, self.script = rank, script
        self.group = _control_group()
        self.torch = Side(TorchDDP, script)
        self.minddp = Side(subject_of(subject, script), script)
        self.control = Side(Unwrapped, script)
        self.exact = script.transport != "hierarchical" or script.world_size == 2
        self.has_recovered = self.has_started_over = False
        self.report = Report()
        self.kinds = {kind_of(layer) for layer in script.layers}

    def play(self) -> Report:
        where = "construction"
        try:
            for number, line in enumerate(self.script.program()):
                where = f"line {number - self.script.calm_steps} `{line!r}`"
                try:
                    self._play_line(line, number)
                finally:
                    self.report.states.append(self._fingerprint())
        except _Over:
            pass
        except _Failed as failure:
            cause = "".join(traceback.format_exception(failure.__cause__)) if failure.__cause__ else ""
            self.report.failure = f"{where}: {failure}\n{cause}".rstrip()
        else:
            self._require_ranks_in_step()
        if (guard := getattr(self.minddp.ddp, "guard", None)) is not None:
            guard.close()
            self.report.findings = [finding.text for finding in guard.findings]
        return self.report

    def _fingerprint(self) -> int:
        """Of the parameters that data parallelism keeps equal."""
        named, frozen = self.minddp.named_params.items(), self.minddp.model.frozen_from_the_start
        flat = [param.detach().contiguous().view(-1) for name, param in named if name not in frozen]
        return zlib.crc32(torch.cat([param.view(torch.uint8) for param in flat]).cpu().numpy().tobytes())

    def _require_ranks_in_step(self) -> None:
        """One more all-reduce: its sum is wrong if some rank has made too few or too many."""
        ones = torch.ones(3, device=DEVICE)
        dist.all_reduce(ones)
        if ones.tolist() != [float(dist.get_world_size())] * 3:
            self.report.failure = f"ranks are out of step: an all-reduce of ones gave {ones.tolist()}"

    def _play_line(self, line: Line, number: int) -> None:
        for side in (self.torch, self.minddp, self.control):
            side.turn = number
        self.control.adopt(self.torch, grads=True)
        if not (self.exact or self.script.in_double):  # rounding must not grow from line to line
            self.minddp.adopt(self.torch, grads=False)
        change = CHANGES[line.name]
        outcomes = [_attempt(lambda: change(side, *line.args)) for side in (self.torch, self.minddp)]
        control = _attempt(lambda: change(self.control, *line.args))
        fails = line.name == "fail_and_step" or (line.name == "fail" and line.args[0] == "backward")
        if not self._judge(outcomes, control, fails=fails):
            return
        # Buffers that the forward uses are broadcast before it, which the control does not do.
        has_mean = self.minddp.hook_name in (None, *MEAN_HOOKS) and "running mean" not in self.kinds
        if self.script.options.static_graph and _may_stay_local(line) and has_mean:
            self._require_mean(control)
        if self.torch.wants_step:
            steps = [_attempt(side.optimize) for side in (self.torch, self.minddp)]
            self._judge(steps, control)

    # ------------------------------------------------------------------ the rules

    def _judge(self, outcomes: Sequence[_Outcome], control: _Outcome, *, fails: bool = False) -> bool:
        """Apply [Note: the verdict] to one stage. False after an error, be it the script's own (`fails`)."""
        expected, got = outcomes
        differing = self._differences(expected, got) if not (expected.error or got.error) else []
        torch_raised, minddp_raised, differ, torch_is_unfinished = self._anywhere(
            expected.error, got.error, differing, _attempt(self.torch.ddp._check_reducer_finalized).error
        )
        if torch_raised:
            self._note("both raise" if minddp_raised else "torch alone raises", expected.error)
            if not minddp_raised:
                self._require_mean_or_error(expected, control)
            self._check_kind(got.error, expected.error)
        elif minddp_raised:
            self._check_kind(got.error, expected.error)
            self._settle_minddp_alone(got, control)
        elif fails:
            self._recover(straight=self.script.options.static_graph, of_script=True)
            return False
        elif torch_is_unfinished:
            self._require_both_to_raise_next()
        elif differ:
            self._settle_difference(differing, control)
        else:
            return True
        if not self.script.goes_on:
            raise _Over
        self._recover(straight=True)
        return False

    def _require_mean_or_error(self, expected: _Outcome, control: _Outcome) -> None:
        """Torch has raised, minddp not: see [Note: the verdict], 2."""
        wrong = self._not_the_mean(self.minddp, control)
        [is_wrong] = self._anywhere(wrong)
        if is_wrong:
            late = _attempt(lambda: (self.minddp.optimize(), self.minddp.forward(99)))
            [raises_late] = self._anywhere(late.error)
            if not raises_late:
                raise _Failed(f"torch {expected}, minddp returns, but not with the mean: {wrong}")

    def _require_mean(self, control: _Outcome) -> None:
        """Both have returned, where torch's gradients may be local: see [Note: the verdict], 5."""
        wrong = self._not_the_mean(self.minddp, control)
        [is_wrong] = self._anywhere(wrong)
        if is_wrong:
            raise _Failed(f"minddp returns as torch does, but not with the mean: {wrong}")

    def _require_both_to_raise_next(self) -> None:
        """Torch's gradients are undefined until then: some buckets are on their way."""
        expected = _attempt(lambda: self.torch.forward(99))
        late = _attempt(lambda: (self.minddp.optimize(), self.minddp.forward(99)))
        torch_raises, minddp_raises = self._anywhere(expected.error, late.error)
        if torch_raises and not minddp_raises:
            raise _Failed(f"torch {expected} in its next forward, minddp neither there nor in the optimizer's step")
        self._check_kind(late.error, expected.error)
        self._note("both raise in the next forward", expected.error)

    def _settle_minddp_alone(self, got: _Outcome, control: _Outcome) -> None:
        """minddp has raised, torch not: see [Note: the verdict], 3 and 4, and [Note: after an error]."""
        differs = self._differs_between_ranks(self.torch)
        wrong = self._not_the_mean(self.torch, control)
        [torch_is_wrong] = self._anywhere(wrong or differs)
        [raises_next] = self._anywhere(_attempt(lambda: self.torch.forward(99)).error)
        if raises_next:
            self._note("minddp raises early", got.error)
        elif torch_is_wrong:
            self._note("torch is silently wrong: minddp raises", got.error)
        elif self.has_recovered:
            self._note("minddp raises after an error", got.error)
            raise _Over
        else:
            raise _Failed(f"torch returns, minddp {got}") from got.error

    def _settle_difference(self, differing: list[str], control: _Outcome) -> None:
        """Both have returned, with other bits: see [Note: the verdict], 4."""
        if not self.torch.wants_step:
            raise _Failed(f"other bits than torch's, though nothing is reduced: {differing or 'on another rank'}")
        torch_wrong, minddp_wrong = self._anywhere(
            self._not_the_mean(self.torch, control), self._not_the_mean(self.minddp, control)
        )
        if minddp_wrong or not torch_wrong:
            both = f"minddp is {'wrong' if minddp_wrong else 'near'}, torch {'wrong' if torch_wrong else 'right'}"
            raise _Failed(f"other bits than torch's; by the control, {both}: {differing or 'on another rank'}")
        self._note("torch is silently wrong: minddp has the mean", None)

    def _check_kind(self, error: Exception | None, expected: Exception | None) -> None:
        strange = error is not None and not isinstance(error, RuntimeError) and type(error) is not type(expected)
        [is_strange] = self._anywhere(strange)
        if is_strange:
            raise _Failed(f"torch {_Outcome(error=expected)}, minddp {_Outcome(error=error)}") from error

    def _recover(self, *, straight: bool, of_script: bool = False) -> None:
        """See [Note: after an error]. The subject is torch's, too, where this search is itself under test."""
        for side in (self.torch, self.minddp, self.control):
            side.settle(straight=straight)
        self.torch.start_over(init_sync=False)
        self.has_started_over = True
        if isinstance(self.minddp.ddp, TorchDDP):
            self.minddp.start_over(init_sync=False)
        if not (self.script.in_double and of_script):  # whose parameters are copies until the next forward
            self.minddp.adopt(self.torch, grads=False)
        self.exact = self.exact and self.script.world_size == 2
        self.has_recovered |= not of_script

    # ------------------------------------------------------------------ what is compared

    def _differences(self, expected: _Outcome, got: _Outcome) -> list[str]:
        found = differing_sides(self.torch, self.minddp, exact=self.exact)
        for index, pair in enumerate(zip_longest(expected.outputs, got.outputs)):
            if difference_found := rounded_difference(*pair, self.script, exact=self.exact):
                found.append(f"output {index} {difference_found}")
        if self.torch.hook_name == "take_notes" and self.exact and not self.has_started_over:
            found += different_notes(self.torch, self.minddp)
        return [f"rank {self.rank}, {text}" for text in found[:_LONGEST_LIST]]

    def _not_the_mean(self, side: Side, control: _Outcome) -> list[str]:
        """Where a side's gradients are not the mean over the ranks of what the control has computed. Collective."""
        [control_failed] = self._anywhere(control.error)
        if control_failed:
            return ["the unwrapped model raises too"]
        found = []
        for name, mean in self.control.mean_grads(self.group).items():
            if found_difference := far(mean, side.named_params[name].grad):
                found.append(f"gradient of `{name}` {found_difference}")
        return found[:_LONGEST_LIST]

    def _differs_between_ranks(self, side: Side) -> bool:
        """If rank 0 has other bits. A mean that is nearly right may differ by less than rounding does."""
        found = False
        for param in side.named_params.values() if self.minddp.hook_name in (None, *MEAN_HOOKS) else ():
            grad = torch.zeros_like(param) if param.grad is None else param.grad.detach().to_dense().contiguous()
            of_first = grad.clone()
            dist.broadcast(of_first, 0, group=self.group)
            found |= not torch.equal(of_first, grad)
        return found

    def _anywhere(self, *facts: Any) -> list[bool]:
        """For each, True if it is true on some rank."""
        marks = torch.tensor([float(bool(fact)) for fact in facts], device=DEVICE)
        dist.all_reduce(marks, group=self.group)
        return [mark > 0 for mark in marks.tolist()]

    def _note(self, what: str, error: Exception | None) -> None:
        self.report.notes.append(what if error is None else f"{what}: {_first_line(error)}")


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a stage: outputs, or an error."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    error: Exception | None = None

    def __str__(self) -> str:
        return "returns" if self.error is None else f"raises {type(self.error).__name__}: {_first_line(self.error)}"


def _attempt(act: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(outputs=act() or [])
    except Exception as error:
        return _Outcome(error=error)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:_LONGEST_MESSAGE]


def _may_stay_local(line: Line) -> bool:
    """See [Note: the verdict], 5. A head backward that enters where the first one went through is as `again`."""
    return line.name in ("train", "heads", "asks", "penalise", "hessian") and line.args != ("with view", "reversed")


@functools.cache
def _control_group() -> dist.ProcessGroup:
    """A group beside the default one, for verdicts: made once in a process."""
    return dist.new_group()
