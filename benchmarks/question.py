"""What questions that ranks answer by a race have in common: options, how they are asked, what a report holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.console import Console

from benchmarks import machine, results
from benchmarks.display import console_of
from benchmarks.harness import Rounds
from benchmarks.launch import run_ranks


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """A question's `Config` adds its own to these.

    Raises:
        ValueError: an option is below what `LEAST` says.
    """

    LEAST: ClassVar[dict[str, int]] = {"rounds": 1, "warmup_rounds": 1, "world_size": 1, "threads": 1}

    rounds: int = 16
    """Timed rounds."""
    warmup_rounds: int = 2
    """Rounds thrown away, in which the buckets are rebuilt."""
    world_size: int = 2
    threads: int = 1
    """Compute threads of each rank."""
    seed: int = 0
    """Of the weights, the data, the order of turns and the bootstrap."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/QUESTION.json."""
    timeout_s: float = 1800.0
    """Give up, and end the ranks, after this long."""

    def __post_init__(self) -> None:
        refuse_less_than(self.LEAST, self)

    @property
    def race_rounds(self) -> Rounds:
        return Rounds(self.rounds, self.warmup_rounds, self.seed)


def refuse_less_than(least: Mapping[str, int], config: object) -> None:
    for option, bound in least.items():
        given = getattr(config, option)
        if given < bound:
            raise ValueError(f"{option} is {given}; it must be at least {bound}.")


Options = TypeVar("Options", bound=RaceOptions)


def ask(
    question: str,
    answer: Callable[[int, Options], dict[str, Any]],
    config: Options,
    show: Callable[[Mapping[str, Any], Console], None],
) -> None:
    """Have `answer(rank, config)` called on every rank; show what rank 0 reports, and keep it."""
    report, *_ = run_ranks(
        answer, config, world_size=config.world_size, threads=config.threads, timeout_s=config.timeout_s
    )
    show(report, console_of())
    results.write(report, config.out or results.path_of(question))


def report_of(question: str, config: RaceOptions, **answers: Any) -> dict[str, Any]:
    """Ready for JSON: what was asked, on which machine, with which options, and the answers."""
    return {
        "question": question,
        "machine": machine.describe() | {"load_average": machine.load_average()},
        "config": results.of_config(config),
        **answers,
    }
