"""One scenario on one rank: torch's DDP and the one under test, step by step, in one process group.

[Note: what counts as parity]
After every step outputs, gradients (whether there is one, dtype, strides), parameters and buffers have equal
bits, and where torch raises, the subject raises an exception of the same type, and the scenario ends. Three
exceptions:

1. Unfinished reduction. Where a backward leaves parameters without gradient, torch raises a RuntimeError at
   the next forward. The subject may raise its RuntimeError in that backward already. Either way the scenario
   ends there, and only if torch does raise at its next forward. Gradients are not compared: torch has reduced
   some buckets and not others, and some are still on their way.
2. Interrupted backward. Torch can not go on once an exception has cut a reduction short: every later forward
   raises. The subject can. So torch starts over with a new wrapper around the same weights, and from then on
   each step need only be close: the new wrapper has not rebuilt its buckets, and sums round in another order.
3. False alarms. Torch raises some errors that are, by its own words or by mistake, failures of its reducer and
   not of the script; `_is_false_alarm` lists them. The subject may raise too, or go on; the scenario ends.
"""

from __future__ import annotations

import importlib
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.parity.compare import differences, different_outputs
from tests.parity.scenario import Interrupt, Scenario
from tests.parity.steps import Replica, perform

SUBJECT = "minddp:DistributedDataParallel"
_LONGEST_LIST = 12  # mismatches reported per rank


class Diverged(AssertionError):
    """The subject raised where torch did not, or the other way round: the ranks can not go on together."""


@dataclass
class Report:
    """One rank's result: the first step with mismatches, and the error, if any, that both raised in the end."""

    mismatches: list[str] = field(default_factory=list)
    ended_by: str | None = None
    states: list[int] = field(default_factory=list)  # fingerprints of the subject's parameters after each step
    findings: list[str] = field(default_factory=list)  # what the subject's guard has reported on this rank


def run_scenario(rank: int, scenario: Scenario, subject: str = SUBJECT) -> Report:
    """Play the scenario on this rank; all ranks of the default process group must do so together.

    Raises:
        Diverged: the subject raised and torch did not, or vice versa, or they raised different types.
    """
    module, _, name = subject.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = _Run(rank, scenario, getattr(importlib.import_module(module), name))
        report = run.play()
        report.findings = run.findings()
    _check_ranks_still_agree(report)
    return report


class _Run:
    def __init__(self, rank: int, scenario: Scenario, subject: type):
        self.rank, self.scenario = rank, scenario
        self.wrappers = {"torch": TorchDDP, "minddp": subject}
        self.native: Replica | None = None
        self.subject: Replica | None = None
        self.exact = True
        self.raised_early = False
        self.report = Report()

    def play(self) -> Report:
        replicas = self._both("construction", self._construct)
        if replicas is None:
            return self.report
        self.native, self.subject = replicas
        self._note("construction", [])
        for turn, step in enumerate(self.scenario.script):
            where = f"step {turn} `{step!r}`"
            outputs = self._both(where, lambda side: perform(step, self._side(side), turn))
            if outputs is None:
                break
            finished = _is_finished(self.native)
            if isinstance(step, Interrupt):
                self._recover(finished)
            elif not finished:
                self._settle_unfinished(where, turn)
                break
            self._note(where, outputs)
        return self.report

    def findings(self) -> list[str]:
        guard = getattr(self.subject and self.subject.ddp, "guard", None)
        if guard is not None:
            guard.close()
        return [] if guard is None else [finding.text for finding in guard.findings]

    def _construct(self, side: str) -> Replica:
        return Replica(self.wrappers[side], self.scenario, self.rank)

    def _both(self, where: str, act: Callable[[str], Any]) -> list[Any] | None:
        """`[act("torch"), act("minddp")]`, or None when they raised and the scenario is over."""
        results, errors = zip(*(_attempt(act, side) for side in ("torch", "minddp")), strict=True)
        expected, got = errors
        if expected is None and got is None:
            return list(results)
        self.raised_early = expected is None and isinstance(got, RuntimeError) and not _is_finished(self.native)
        if self.raised_early:
            return list(results)  # see [Note: what counts as parity], 1
        alone = got is None and expected is not None and _is_false_alarm(expected, self.scenario)
        if type(expected) is not type(got) and not alone:
            raise Diverged(
                f"{where}: torch {_outcome(expected)}, but minddp {_outcome(got)}\nin {self.scenario!r}"
            ) from got
        self.report.ended_by = f"{where}: {_outcome(expected)}{' (torch alone)' if alone else ''}"
        return None

    def _settle_unfinished(self, where: str, turn: int) -> None:
        """Torch left a reduction unfinished: its next forward must raise, and the subject have raised by then."""
        raised_early = self.raised_early

        def next_forward(side: str) -> None:
            if side == "minddp" and raised_early:
                raise RuntimeError("already, in backward")
            self._side(side).forward(turn + 1)

        if self._both(f"the forward after {where}", next_forward) is not None:
            raise Diverged(f"{where}: an unfinished reduction, but no error in the next forward")

    def _side(self, side: str) -> Replica:
        return self.native if side == "torch" else self.subject

    def _recover(self, finished: bool) -> None:
        """See [Note: what counts as parity], 2.

        Even where torch finds nothing unfinished, the first pass of a static graph may be lost to it, and a
        reentrant checkpoint may have finished the reduction before the interruption.
        """
        nested = any(layer.kind == "checkpointed_reentrant" for layer in self.scenario.model.layers)
        if finished and not nested and not self.scenario.options.static_graph:
            return
        self.native.start_over()
        if TorchDDP in type(self.subject.ddp).__mro__:  # where this harness is itself under test
            self.subject.start_over()
        self.exact = False
        self.native.kept_gradients = self.subject.kept_gradients = {}

    def _averaged(self) -> list[torch.Tensor]:
        """The subject's parameters that data parallelism keeps equal on all ranks."""
        ddp = self.subject.ddp
        return [
            p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ddp.parameters_to_ignore
        ]

    def _note(self, where: str, outputs: list[Any]) -> None:
        """Compare; only the first step that differs is reported, what follows differs in consequence."""
        bits = [param.detach().reshape(-1).view(torch.uint8).cpu().numpy() for param in self._averaged()]
        self.report.states.append(zlib.crc32(b"".join(map(bytes, bits))))
        if self.report.mismatches:
            return
        found = [*differences(self.native, self.subject, exact=self.exact)]
        if self.exact:
            self.native.keep_gradients()
            self.subject.keep_gradients()
        elif not found:
            self.native.adopt(self.subject)
        if outputs:
            found += different_outputs(*outputs, exact=self.exact)
        self.report.mismatches = [f"rank {self.rank}, {where}: {what}" for what in found[:_LONGEST_LIST]]


def _is_false_alarm(error: Exception, scenario: Scenario) -> bool:
    """See [Note: what counts as parity], 3.

    - "INTERNAL ASSERT FAILED": a static graph that begins with accumulation under `no_sync`.
    - "This indicates a bug in DDP implementation": a second backward through one graph counts as use in the
      next pass.
    - "mark a variable ready only once", with find_unused_parameters: torch looks for them in the last
      forward, although this backward may belong to another one, to several, or to nested ones.
    - "your training graph has changed", when a static graph has an output that the loss never uses: only in the
      first pass torch fires the hooks behind it.
    - "bucket_cap_mb should be set by now": torch 2.11 and a capacity of 0.
    - "modified by an inplace operation": in torch 2.11 the broadcast of buffers, if the forward before has not had
      its backward yet.
    """
    model, options = scenario.model, scenario.options
    alarms = [
        "INTERNAL ASSERT FAILED",
        "This indicates a bug in DDP implementation",
        "bucket_cap_mb should be set by now",
        "modified by an inplace operation",
    ]
    if options.find_unused_parameters and not options.static_graph:
        alarms.append("Expected to mark a variable ready only once")
    if options.static_graph and model.output != "tensor" and model.loss_uses == "main":
        alarms.append("our training graph has changed")
    return isinstance(error, (RuntimeError, AssertionError)) and any(words in str(error) for words in alarms)


def _check_ranks_still_agree(report: Report) -> None:
    """One more all-reduce: it fails, or its sum is wrong, if some rank has made too few or too many."""
    ones = torch.ones(3)
    try:
        dist.all_reduce(ones)
    except RuntimeError as error:
        raise Diverged(f"the process group is broken; the scenario was {report}") from error
    if not torch.equal(ones, torch.full((3,), float(dist.get_world_size()))):
        raise Diverged(f"ranks are out of step, an all-reduce of ones gave {ones}; the scenario was {report}")


def _attempt(act: Callable[[str], Any], side: str) -> tuple[Any, Exception | None]:
    try:
        return act(side), None
    except Exception as error:
        return None, error


def _is_finished(native: Replica | None) -> bool:
    """True if torch's reducer considers the last reduction done, as its next forward checks."""
    if native is None:
        return True
    try:
        native.ddp._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _outcome(error: Exception | None) -> str:
    if error is None:
        return "went on"
    return f"raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
