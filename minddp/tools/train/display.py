"""What is shown: a line for each training record and each validation, and at the end a picture of the run."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from minddp.tools.train.metrics import Means, MetricsLog

COLOURS = {"start": "tab:red", "checkpoint": "tab:gray", "stop": "tab:purple"}


def training_line(record: dict[str, Any], done: float, targets_are: str) -> str:
    """A record of the training log, when `done` in [0, 1] of the run is."""
    facts = (
        f"{done:4.0%}  step {record['step']}  loss {record['loss']:.3f}  lr {record['learning_rate']:.2e}  "
        f"{record['targets_per_s']:,.0f} {targets_are}/s  {record['memory_mib']:,} MiB  "
        f"{record['tflops_per_s']:.2g} TFLOP/s"
    )
    if record["data_share"] >= 0.01:
        facts += f"  waits {record['data_share']:.0%} for data"
    if "waited_ms" in record:
        facts += f"  waits {record['waited_ms']:.1f} ms a step for gradients"
    if "late_rank" in record:
        facts += f", for rank {record['late_rank']}: {record['late_ms']:.1f} ms {record['late_phase']}"
    if "loss_scale" in record:
        facts += f"  loss scale {record['loss_scale']:g}"
    return facts


def validation_line(step: int, means: Means, targets_are: str) -> str:
    """The outcome of a validation; perplexity is e to the loss, the number of equally likely choices."""
    return (
        f"step {step}  validation loss {means.loss:.3f}  perplexity {math.exp(min(means.loss, 700)):.2f}  "
        f"accuracy {means.accuracy:.1%} of {means.targets:,} {targets_are}"
    )


def draw(log: MetricsLog, path: Path, targets_are: str) -> str:
    """Draw the run that `log` holds. Returns a sentence that says where, or why not."""
    if importlib.util.find_spec("matplotlib") is None:
        return 'No picture of the run: matplotlib is not installed. Run: pip install "minddp[train]"'
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, sharex=True)
    training, validation = log.records("training"), log.records("validation")
    losses.plot([r["step"] for r in training], [r["loss"] for r in training], label="training", lw=1)
    losses.plot([r["step"] for r in validation], [r["loss"] for r in validation], "o-", label="validation")
    losses.set_ylabel("loss")
    rates.plot([r["step"] for r in training], [r["targets_per_s"] for r in training], lw=1)
    rates.set_ylabel(f"{targets_are} per second")
    rates.set_ylim(bottom=0)
    rates.set_xlabel("optimizer step; lines are events")
    for what, colour in COLOURS.items():
        steps = [record["step"] for record in log.records("event") if record["what"] == what]
        for number, step in enumerate(steps):
            losses.axvline(step, color=colour, lw=0.6, label=None if number else what)
            rates.axvline(step, color=colour, lw=0.6)
    losses.legend()
    figure.savefig(path, dpi=110)
    return f"Loss, throughput and events: {path}"
