"""`with minddp.audit(model, optimizer) as a:` audits the steps inside; then `a.explain()` shows the verdict."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from minddp.platform import wording
from minddp.platform.store import Messages
from minddp.tools.audit.recorder import GradientRecorder, StepSketches, audited_params
from minddp.tools.audit.report import Report
from minddp.tools.audit.weights import solve_step
from minddp.tools.watchdog.observer import module_of

_log = logging.getLogger(__name__)
LIMIT_S = 60.0  # for rank 0 to wait for the sketches of the others
PIECE = 4 * 2**20  # bytes; a store takes values up to 8 MiB


class Audit:
    """Audits up to `steps` optimizer steps on all ranks, after `warm_up` others. The report is on rank 0.

    Args:
        model: has the parameters and their names; by default the module that has most of the optimizers'.
        optimizer: by default those that step during the warm-up. A script that updates parameters itself calls
            `before_update()` before it does.
        weights: called in each backward, returns the weight that it should have, such as its number of tokens; by
            default the number of elements that the loss reduces.
        then: called with the report on rank 0.

    Raises:
        ValueError: neither model, nor optimizer, nor warm-up.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        steps: int = 3,
        warm_up: int = 0,
        weights: Callable[[], float] = lambda: 0.0,
        then: Callable[[Report], None] = lambda report: None,
    ):
        if model is None and optimizer is None and warm_up == 0:
            raise ValueError("Pass the model or the optimizer, or a warm_up in which they are looked for.")
        self._model, self._weights, self._then = model, weights, then
        self._num_steps, self._warm_up = steps, warm_up
        self._optimizers = [] if optimizer is None else [optimizer]
        self._hooks: list[Any] = []
        self._num_seen = 0  # steps of the first optimizer that have ended
        self._num_audited = 0
        self._recorder: GradientRecorder | None = None
        self._messages: Messages | None = None
        self._report: Report | None = None

    def __enter__(self) -> Audit:
        if self._warm_up == 0:
            self._begin()
        else:
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for hook in self._hooks:
            hook.remove()
        recorder, self._recorder = self._recorder, None
        steps = [] if recorder is None else recorder.stop()
        self._num_audited += len(steps)
        if recorder is not None and steps and error is None and (ranks := self._gather(steps)) is not None:
            self._report = report_of(ranks, recorder)
            self._then(self._report)

    @property
    def report(self) -> Report:
        """The measured weights and their verdict.

        Raises:
            RuntimeError: this is not rank 0, or no step was audited.
        """
        if self._report is None:
            raise RuntimeError("There is no report: rank 0 has it, after steps of all ranks were audited.")
        return self._report

    def before_update(self) -> None:
        """All gradients are about to be used."""
        if self._recorder is not None:
            self._recorder.take()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """In the warm-up. Not before the step, which may call a closure."""
        self._optimizers += [optimizer] if optimizer not in self._optimizers else []
        self._num_seen += optimizer is self._optimizers[0]
        if self._recorder is None and self._num_seen == self._warm_up:
            self._begin()

    def _begin(self) -> None:
        params = audited_params(self._model or module_of(self._optimizers, innermost=True), self._optimizers)
        self._recorder = GradientRecorder(params, self._weights, self._end_after)
        self._hooks.append(register_optimizer_step_pre_hook(self._recorder.before_step))
        if dist.is_available() and dist.is_initialized():
            store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
            self._messages = Messages.open(store, "minddp/tools/audit", rank, dist.get_world_size())

    def _end_after(self, num_steps: int) -> None:
        if num_steps == self._num_steps:
            self.__exit__(None, None, None)

    def _gather(self, steps: list[StepSketches]) -> list[list[StepSketches]] | None:
        """All ranks' steps, on rank 0."""
        if (messages := self._messages) is None:
            return [steps]
        data = pickle.dumps(steps)
        pieces = [data[begin : begin + PIECE] for begin in range(0, len(data), PIECE)]
        for number, piece in enumerate(pieces):
            messages.post(piece, "piece", number)
        messages.post(len(pieces), "pieces")
        if messages.rank > 0:
            return None
        counts = messages.gather("pieces", limit_s=LIMIT_S)
        if absent := [rank for rank in range(messages.world_size) if rank not in counts]:
            _log.warning("No audit: %s sent nothing within %g s.", wording.ranks(absent), LIMIT_S)
            return None
        datas = [b"".join(messages.take(rank, "piece", i) for i in range(counts[rank])) for rank in sorted(counts)]
        return list(map(pickle.loads, datas))


def report_of(ranks: Sequence[Sequence[StepSketches]], recorder: GradientRecorder) -> Report:
    solved, notes, before = [], [], ()
    is_sharded = any(one.param is not one.arrives_in for one in recorder.params)
    for number, step in enumerate(zip(*ranks, strict=False), 1):
        try:
            solved.append(solve_step(step, before, is_sharded))
        except ValueError as error:
            notes.append(f"Step {number} of the audit is left out: {error}")
        before = step
    return Report([one.name for one in recorder.params], solved, notes)


def audit_process(setting: str) -> None:
    """Audit the script of this process: `setting` is FIRST:LAST:FOLDER, in optimizer steps."""
    first, last, folder = setting.split(":", 2)

    def show(report: Report) -> None:
        report.explain()
        report.save(Path(folder, "audit.html"))

    audit = Audit(steps=int(last) - int(first), warm_up=max(1, int(first)), then=show).__enter__()

    def finish() -> None:
        audit.__exit__(None, getattr(sys, "last_value", None), None)
        if 0 < audit._num_seen <= audit._warm_up and not audit._num_audited:
            _log.warning("No audit: the optimizer took %d steps, and it begins after %s.", audit._num_seen, first)

    Finalize(None, finish, exitpriority=0)  # `atexit` is not for processes that are forked
