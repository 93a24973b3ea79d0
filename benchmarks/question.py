"""A question as a command: its options, the ranks that answer it, and the report that is printed and saved."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from benchmarks import machine
from benchmarks.display import Table, console_of
from benchmarks.harness import Rounds
from benchmarks.launch import DeviceName, run_ranks, under_torchrun
from benchmarks.workloads import Size
from minddp.platform.ranks import RankFailure

_IN_REPOSITORY = Path(__file__).parent / "results"
RESULTS = _IN_REPOSITORY if _IN_REPOSITORY.is_dir() else Path("benchmark_results")  # of an installed minddp: here
QUICK_ROUNDS = 8

Report = Mapping[str, Any]


class ModelError(Exception):
    """The user's model cannot be trained. The message gives the reason and a remedy."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every question.

    Raises:
        ValueError: an option is below what `LEAST` says.
    """

    LEAST: ClassVar[dict[str, int]] = {"world_size": 1, "threads": 1}

    world_size: int = 2
    threads: int = 1
    """Compute threads of each rank."""
    seed: int = 0
    """Seed of the weights, the data, the order of turns and the bootstrap."""
    size: Literal["full", "quick", "smoke"] = "full"
    """quick: fewer rounds. smoke: tiny models and two rounds, to see that all runs. Both are written only where
    `out` says."""
    out: Path | None = None
    """Folder for JSON and tables; by default benchmarks/results, of an installed minddp benchmark_results here."""
    timeout_s: float = 1800.0
    """Give up, and end the ranks, after this long."""

    def __post_init__(self) -> None:
        for option, bound in self.LEAST.items():
            given = getattr(self, option)
            if given < bound:
                raise ValueError(f"{option} is {given}; it must be at least {bound}.")

    @property
    def workload_size(self) -> Size:
        return "tiny" if self.size == "smoke" else "full"

    def path(self, question: str) -> Path | None:
        """The file to write; `None` for a look, which does not overwrite a measurement."""
        if self.out is not None:
            return path_of(question, self.out)
        return path_of(question) if self.size == "full" else None


@dataclass(frozen=True, kw_only=True)
class RaceOptions(Options):
    """The options of a question that is answered by a race."""

    LEAST = Options.LEAST | {"rounds": 1, "warmup_rounds": 1}

    rounds: int = 16
    """Timed rounds."""
    warmup_rounds: int = 2
    """Rounds thrown away, in which the buckets are rebuilt."""

    @property
    def race_rounds(self) -> Rounds:
        timed = {"full": self.rounds, "quick": min(self.rounds, QUICK_ROUNDS), "smoke": 2}[self.size]
        return Rounds(timed, 1 if self.size == "smoke" else self.warmup_rounds, self.seed)

    def turn(self, suitable: int) -> int:
        """The steps of a turn for which `suitable` ones are enough."""
        return 1 if self.size == "smoke" else suitable


AnyOptions = TypeVar("AnyOptions", bound=Options)


def ask(
    question: str,
    answer: Callable[[int, AnyOptions], dict[str, Any]],
    config: AnyOptions,
    tables: Callable[[Report], Iterable[Table]],
    *,
    device: DeviceName = "cpu",
    settle: Callable[[int], str] | None = None,
) -> None:
    """Call `answer(rank, config)` on every rank; show the tables of rank 0's report, and write it.

    `device` and `settle` are those of `run_ranks`.
    """
    console, load_average = console_of(), machine.load_average()
    if under_torchrun():
        config = dataclasses.replace(config, world_size=int(os.environ["WORLD_SIZE"]))
    if load_average > 0.5:
        console.print(f"The machine is busy (load average {load_average:.1f}): expect a wide spread.")
    try:
        report, *_ = run_ranks(
            answer,
            config,
            world_size=config.world_size,
            threads=config.threads,
            timeout_s=config.timeout_s,
            device=device,
            settle=settle,
        )
    except (RankFailure, ModelError) as failure:
        reports = failure.reports.values() if isinstance(failure, RankFailure) else [f"ModelError: {failure}"]
        reasons = [report.rpartition("ModelError: ")[2].strip() for report in reports if "ModelError: " in report]
        if not reasons:
            raise
        raise SystemExit(f"minddp bench {question}: {reasons[0]}") from None
    if under_torchrun() and os.environ["RANK"] != "0":
        return
    report["machine"] |= {"load_average_before": load_average}
    for table in tables(report):
        table.show(console)
    path = config.path(question)
    if path is not None:
        write(report, path)
        console.print(f"Written: {path}")
    if config.out is not None:
        pages = "\n\n".join(table.markdown() for table in tables(report))
        path_of(question, config.out).with_suffix(".md").write_text(pages + "\n")


# ------------------------------------------------------------------ reports


def report_of(question: str, config: Options, device: str = "cpu", **answers: Any) -> dict[str, Any]:
    """The question, the machine, the options, and the answers: dicts, lists, texts and numbers.

    Paths are left out: they mean nothing on another machine.
    """
    chosen = {name: value for name, value in vars(config).items() if not isinstance(value, Path)}
    report = {"question": question, "machine": machine.describe(device), "config": chosen, **answers}
    return json.loads(json.dumps(report, default=dataclasses.asdict))


def path_of(question: str, directory: Path = RESULTS) -> Path:
    """The file of the answer to `question` unless the user says otherwise."""
    return directory / f"{question}.json"


def write(report: Report, path: Path) -> None:
    """As JSON, a row of numbers on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda row: re.sub(r"\s+", " ", row.group()), text) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """A report that `write` has written; `None` if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None
