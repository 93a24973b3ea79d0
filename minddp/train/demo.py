"""`minddp demo`: train a GPT on two CPU ranks for a minute, then compare its first steps with torch's DDP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minddp.platform.launcher import RanksFailed, Stopped, launch
from minddp.train.metrics import MetricsLog
from minddp.train.settings import GPTOptions, SettingsError

if TYPE_CHECKING:
    from minddp.train.compare import Comparison

RANKS = 2
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class DemoSettings:
    """Train a small GPT for a minute, then repeat its first steps with torch's DDP and compare all bits.

    Exit status 1 when the bits differ or the validation loss misses its target.
    """

    minutes: float = 1.0
    """Time to train."""
    turns: int = 12
    """Turns of 4 steps that each wrapper takes in the comparison."""
    target: float = 2.2
    """The validation loss to get below, in nats per byte."""
    out: Path = Path("runs/demo")
    """Folder for checkpoint.pt, metrics.jsonl and compare.json; an earlier demo's are replaced."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise SettingsError(f"--minutes must be a positive, finite number, but is {self.minutes}.")
        if self.turns < 2:
            raise SettingsError(f"--turns must be at least 2, since the first is not timed, but is {self.turns}.")


def main(arguments: Sequence[str]) -> int:
    """Run `minddp demo` with these arguments; returns the exit status."""
    settings = tyro.cli(DemoSettings, prog="minddp demo", args=list(arguments))
    console = Console(highlight=False)
    try:
        train_for_a_while(settings, console)
        compare_with_torch(settings, console)
    except RanksFailed as error:
        console.print(f"minddp demo: {error}", markup=False)
        return 1
    except Stopped as stopped:
        return 128 + stopped.signal_number
    return summarize(settings, console)


def train_for_a_while(settings: DemoSettings, console: Console) -> None:
    """The first part: `minddp train` with its defaults but for time, folder and device."""
    command = ["train", "--minutes", str(settings.minutes), "--out", str(settings.out), "--overwrite"]
    command += ["--device", "cpu"]
    console.rule(f"[bold]1. Train on {RANKS} ranks", align="left")
    console.print(f"minddp {' '.join(command)}", style="dim", soft_wrap=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    launch(RANKS, "minddp", command)


def compare_with_torch(settings: DemoSettings, console: Console) -> None:
    """The second part: the same first steps under both wrappers."""
    console.rule("[bold]2. Repeat the first steps with torch's DDP and with minddp", align="left")
    out = settings.out / "compare.json"
    with console.status("Both take turns, from the same seed ..."):
        launch(RANKS, "minddp.train.compare", ["--out", str(out), "--turns", str(settings.turns)])


def summarize(settings: DemoSettings, console: Console) -> int:
    """Print the results of both parts; returns the exit status."""
    from minddp.train.compare import Comparison

    log = MetricsLog(settings.out / "metrics.jsonl")
    validation = [record["loss"] for record in log.records("validation")]
    training = [record["loss"] for record in log.records("training")]
    comparison = Comparison.load(settings.out / "compare.json")

    facts = Table.grid(padding=(0, 2))
    facts.add_row("validation loss", describe_loss(validation, settings.target))
    facts.add_row("training loss", f"{training[0]:.2f} {sparkline(training)} {training[-1]:.2f}")
    facts.add_row("bits equal", describe_bits(comparison))
    facts.add_row("speed", describe_speed(comparison))
    console.rule("[bold]3. Summary", align="left")
    console.print(facts)
    for title, text in (("minddp's plan", comparison.plan), ("the model writes", sample(settings.out))):
        console.rule(title, align="left", style="dim")
        console.print(text, markup=False, soft_wrap=True)
    return 0 if validation[-1] < settings.target and not comparison.differences else 1


def describe_loss(losses: Sequence[float], target: float) -> Text:
    """First and last validation loss, and the comparison with the target."""
    reached = losses[-1] < target
    verdict = f"below the target of {target}" if reached else f"MISSED the target of {target}"
    return Text.assemble(
        f"{losses[0]:.3f} -> ",
        (f"{losses[-1]:.3f} nats a byte, {verdict}", "bold green" if reached else "bold red"),
    )


def describe_bits(comparison: Comparison) -> Text:
    """Yes if both wrappers computed the same bits; else where they differ."""
    if comparison.differences:
        return Text("NO: " + "; ".join(comparison.differences[:5]), "bold red")
    return Text.assemble(
        ("yes", "bold green"),
        f", {comparison.steps} steps: every loss and all {comparison.parameters:,} parameters"
        f" on each of {comparison.ranks} ranks",
    )


def describe_speed(comparison: Comparison) -> str:
    """A line per wrapper, and their ratio."""
    lines = [
        f"{wrapper:<7} {comparison.median_ms(wrapper):6.1f} ms a step "
        f"{comparison.targets_per_s(wrapper):9,.0f} bytes/s"
        for wrapper in comparison.step_ms
    ]
    turns = len(comparison.step_ms["minddp"])
    return "\n".join(
        [*lines, f"minddp takes {comparison.ratio:.3f} of torch's time (median of {turns} paired turns)"]
    )


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The values as a row of at most `width` bars, lowest to highest."""
    columns = min(width, len(values))
    sampled = [values[i * len(values) // columns] for i in range(columns)]
    low, high = min(sampled), max(sampled)
    heights = [(value - low) / (high - low or 1) for value in sampled]
    return "".join(SPARKS[round(height * (len(SPARKS) - 1))] for height in heights)


def sample(folder: Path, prompt: bytes = b"def ", length: int = 240) -> str:
    """The trained model's continuation of `prompt`; bytes that are not text are replaced."""
    from minddp.train.checkpoint import Checkpoint
    from minddp.train.gpt import GPT, continue_text

    checkpoint = Checkpoint.load(folder / "checkpoint.pt")
    options = GPTOptions(**checkpoint.decisive["gpt"])
    model = GPT(options)
    model.load_state_dict(checkpoint.model)
    written = continue_text(model, prompt, length, options.context, temperature=0.7, seed=0)
    text = written.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
