"""How much longer is a step that `minddp.audit` audits?

    python -m benchmarks audit                # about a minute on one core

One process on one thread trains each model. Every second step is audited. Time is that of the CPU: on one thread it
is the step's own, also on a machine that others use. Solving for the weights, after the last step, is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

import minddp
from benchmarks.display import Table, console_of
from benchmarks.workloads import Size, Workload, chain, training_step, workload

WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time steps with and without an audit, in turn."""

    rounds: int = 40
    size: Size = "full"


def main(config: Config) -> None:
    torch.set_num_threads(1)
    rows = [time_workload(task, config.rounds) for task in workloads(config.size)]
    Table("Steps with and without an audit", ["", "ms", "audited, ms", "ratio"], rows).show(console_of())


def workloads(size: Size) -> list[Workload]:
    """Perceptrons of `width`, and usual models."""
    perceptrons = [
        replace(chain(f"mlp_{width}", size, (6, 6, 6), width, 32, 1), title=f"6 linear layers of {width}, batch 32")
        for width in (64, 256, 1024, 2048)
    ]
    deep = replace(chain("deep", size, (8, 100, 100), 32, 32, 1), title="100 linear layers of 32, batch 32")
    return [*perceptrons, deep, workload("transformer", size), workload("convnet", size)]


def time_workload(task: Workload, rounds: int) -> list[str]:
    """The title, the median times in ms of a plain step and an audited one, and the median of their ratios."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)
    step = training_step(model, task, 0, lambda *_, **__: optimizer)
    for _ in range(WARM_UP):
        step()
    plain, audited = [], []
    for _ in range(rounds):
        plain.append(seconds(step))
        with minddp.audit(model, optimizer) as audit:
            audited.append(seconds(step))
        if (verdict := audit.report.verdicts()[0]).is_fault:
            raise RuntimeError(f"A plain step of {task.title} has this verdict: {verdict.text}")
    ratio = median(after / before for before, after in zip(plain, audited, strict=True))
    return [task.title, f"{median(plain) * 1e3:.2f}", f"{median(audited) * 1e3:.2f}", f"{ratio:.2f}"]


def seconds(step: Callable[[], object]) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin
