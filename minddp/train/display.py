"""Terminal output: a line of facts, a progress bar on a terminal, a line for each validation."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from minddp.train.metrics import Means


class Display:
    """Rank 0's console; on the other ranks the same calls print nothing.

    The bar is for terminals. Elsewhere each training record becomes a line, so that a log file has it too.
    """

    def __init__(self, is_main: bool, title: str):
        self.console = Console(quiet=not is_main, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            disable=not is_main or not self.console.is_terminal,
            refresh_per_second=4,  # drawing must not take time from training
            transient=True,
        )
        self._bar = self._progress.add_task(title, total=1.0, facts="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line, above the bar."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def advance(self, progress: float) -> None:
        """Move the bar to `progress` in [0, 1]."""
        self._progress.update(self._bar, completed=progress)

    def training(self, record: dict[str, Any], targets_are: str) -> None:
        """A record of the training log."""
        facts = (
            f"step {record['step']}  loss {record['loss']:.3f}  lr {record['learning_rate']:.2e}  "
            f"{record['targets_per_s']:,.0f} {targets_are}/s"
        )
        self._progress.update(self._bar, facts=facts)
        if self._progress.disable:
            self.say(facts)

    def validation(self, step: int, means: Means, targets_are: str) -> None:
        """The outcome of a validation; perplexity is e to the loss, the number of equally likely choices."""
        self.say(
            f"step {step}  validation loss {means.loss:.3f} nats  perplexity {math.exp(means.loss):.2f}  "
            f"accuracy {means.accuracy:.1%} of {means.targets:,} {targets_are}"
        )
