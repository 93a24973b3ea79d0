"""`with minddp.audit(model, optimizer) as a:` audits the steps inside; afterwards `a` shows and saves the verdict."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minddp.platform import wording
from minddp.platform.store import Messages
from minddp.tools.audit.recorder import Recorder, StepSketches, audited_params
from minddp.tools.audit.report import Report
from minddp.tools.audit.weights import solve_step

_log = logging.getLogger(__name__)
LIMIT_S = 60.0


class Audit:
    """Audits `steps` optimizer steps, after `warm_up` others; all ranks take part, and rank 0 gets the `report`.

    Args:
        model: for the names of parameters; required for FSDP2. By default it is looked for.
        optimizer: one or several, whose parameters are audited; by default those that step during the warm-up, or
            all of the model's without one. A script that updates parameters itself calls `before_update` instead.
        weights: called in each backward, returns the weight that it should have, such as its number of tokens. By
            default the number of elements that the loss reduces.
        limit_s: how long rank 0 waits for the others' sketches.
        then: called with the audit when it has a report, on rank 0.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        *,
        steps: int = 3,
        warm_up: int = 0,
        weights: Callable[[], float] | None = None,
        title: str = "audit",
        limit_s: float = LIMIT_S,
        then: Callable[[Audit], None] = lambda audit: None,
    ):
        if model is None and not optimizer and not warm_up:
            raise ValueError("Pass the model or its optimizer, or a warm_up during which they are looked for.")
        self._model, self._steps, self._warm_up, self._weights = model, steps, warm_up, weights
        self._optimizers = {id(one): one for one in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)}
        self._title, self._limit_s, self._then = title, limit_s, then
        self._num_seen = 0  # steps of the first optimizer
        self._recorder: Recorder | None = None
        self._messages: Messages | None = None
        self._report: Report | None = None
        self._is_first = True

    def __enter__(self) -> Audit:
        self.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop(error)

    @property
    def report(self) -> Report:
        """What was found.

        Raises:
            RuntimeError: this is not rank 0, or the audit is not over, or has failed.
        """
        if self._report is None:
            raise RuntimeError("Only rank 0 has the report of an audit, once the audit is over.")
        return self._report

    def explain(self) -> None:
        """Print the verdict and the weights, on rank 0."""
        if self._is_first:
            self.report.explain()

    def save(self, path: str | Path) -> None:
        """Write them as a page, on rank 0."""
        if self._is_first:
            self.report.save(path)

    def before_update(self) -> None:
        """Call this where no optimizer of torch.optim steps: before gradients are used."""
        if self._recorder is not None:
            self._recorder.take_gradients()

    def start(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        if not self._warm_up:
            self._begin()

    def stop(self, error: BaseException | None = None) -> None:
        """End the audit and compute the report on rank 0; discard it if an `error` ends it."""
        self._hook.remove()
        recorder, self._recorder = self._recorder, None
        if recorder is not None and (steps := recorder.stop()) and error is None:
            ranks = self._gather(steps)
            if ranks is not None:
                self._report = report_of(ranks, recorder, self._title)
                self._then(self)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._recorder is not None:
            return self._recorder.before_step(optimizer, args, kwargs)
        first = next(iter(self._optimizers), id(optimizer))
        self._optimizers.setdefault(id(optimizer), optimizer)
        self._num_seen += id(optimizer) == first
        if self._num_seen == self._warm_up:
            self._begin()
        return None

    def _begin(self) -> None:
        model = self._model or model_of(list(self._optimizers.values()))
        self._recorder = Recorder(audited_params(model, self._optimizers.values()), self._weights)
        self._recorder.when_step_begins = self._after_step
        if dist.is_available() and dist.is_initialized():
            self._is_first = dist.get_rank() == 0
            store = dist.distributed_c10d._get_default_store()
            topic = "minddp/tools/audit"
            self._messages = Messages.open(store, topic, dist.get_rank(), dist.get_world_size())

    def _after_step(self) -> None:
        if self._recorder is not None and len(self._recorder.steps) >= self._steps:
            self.stop()

    def _gather(self, steps: list[StepSketches]) -> list[list[StepSketches]] | None:
        """All ranks' steps, on rank 0. One message for each micro-batch, since a store limits the size of a value."""
        if (messages := self._messages) is None:
            return [steps]
        if messages.rank > 0:
            for number, step in enumerate(steps):
                for place, batch in enumerate(batches := step.micro_batches):
                    messages.post(batch, "batch", number, place)
                step.micro_batches = []
                messages.post((step, len(batches)), "step", number)
            messages.post(len(steps), "steps")
            return None
        others = range(1, messages.world_size)
        counts = messages.gather("steps", limit_s=self._limit_s, ranks=others)
        if absent := [rank for rank in others if rank not in counts]:
            _log.warning("%s posted no sketches within %g s: no audit.", wording.ranks(absent), self._limit_s)
            return None
        all_steps = [steps]
        for rank, count in counts.items():
            all_steps.append([])
            for number in range(count):
                step, num_batches = messages.take(rank, "step", number)
                step.micro_batches = [messages.take(rank, "batch", number, place) for place in range(num_batches)]
                all_steps[-1].append(step)
        return all_steps


def report_of(ranks: list[list[StepSketches]], recorder: Recorder, title: str) -> Report:
    solved, notes = [], []
    is_sharded = any(one.is_sharded for one in recorder.params)
    by_step = list(zip(*ranks, strict=False))
    for number, step in enumerate(by_step):
        try:
            solved.append(solve_step(step, by_step[number - 1] if number else (), is_sharded))
        except ValueError as error:
            notes.append(f"Step {number + 1} of the audit is left out: {error}")
    return Report(title, [one.name for one in recorder.params], solved, notes)


def model_of(optimizers: Sequence[Optimizer]) -> nn.Module | None:
    """The module of this process that has most of their parameters; of several, the innermost."""
    wanted = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}

    def rank_of(module: nn.Module) -> tuple[int, int]:
        named = [(name, param) for name, param in module.named_parameters() if id(param) in wanted]
        return len(named), -sum(len(name) for name, _ in named)

    modules = [it for it in gc.get_objects() if issubclass(type(it), nn.Module) and "_parameters" in vars(it)]
    return max(modules, key=rank_of, default=None)


def audit_process(setting: str) -> None:
    """Audit the script of this process: `setting` is FIRST:LAST:FOLDER, in optimizer steps."""
    first, last, folder = setting.split(":", 2)

    def show(audit: Audit) -> None:
        audit.explain()
        audit.save(Path(folder, "audit.html"))

    title = os.path.basename(sys.argv[0])
    audit = Audit(steps=int(last) - int(first), warm_up=max(1, int(first)), title=title, then=show)
    audit.start()
    # `atexit` is not for processes that are forked.
    Finalize(None, lambda: audit.stop(getattr(sys, "last_value", None)), exitpriority=0)
