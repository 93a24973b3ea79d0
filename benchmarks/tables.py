"""What has been measured, as Markdown tables that a README can take over as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.contestants import AS_IT_COMES, BASELINE
from benchmarks.display import interval, rounds_in_words
from benchmarks.forecast import forecast_cells

Report = Mapping[str, Any]


def write(directory: Path) -> Path:
    """All tables of the questions answered in `directory`, into one file there."""
    path = directory / "tables.md"
    sections = []
    for question, make in TABLES_OF_QUESTION.items():
        report = results.read(results.path_of(question, directory))
        if report is not None:
            sections.append(f"## {question}\n\n{provenance(report)}\n\n{make(report)}\n")
    path.write_text("\n".join(sections))
    return path


def provenance(report: Report) -> str:
    """On what it was measured, and how long."""
    machine, config = report["machine"], report["config"]
    said = [
        f"{machine['cores']:g} cores of {machine['cpu']}",
        f"{machine['os']}",
        f"Python {machine['python']}",
        f"torch {machine['torch']}",
        rounds_in_words(config) if "rounds" in config else "counted, not timed",
    ]
    return "; ".join(said) + "."


def versus_torch(report: Report) -> str:
    """As both come; a row for each workload and setting; the best of each; and everybody's figures."""
    tables = {
        "As they come: `minddp.DistributedDataParallel(model)` against torch's": as_they_come(report),
        "At equal settings, by the process group and by shared memory": equal_settings(report),
        "The fastest setting of each": best_of_each(report),
        "Everybody": everybody(report),
    }
    return "\n\n".join(f"### {title}\n\n" + "\n".join(lines) for title, lines in tables.items())


def as_they_come(report: Report) -> Iterator[str]:
    """Default settings on both sides, minddp's choice of a transport included."""
    yield from header("workload", "rounds", "torch ms", "minddp ms", "ratio", "95% interval")
    for result in report["workloads"].values():
        ours, theirs = (result["contestants"].get(name) for name in (AS_IT_COMES, BASELINE))
        if ours is not None and theirs is not None:
            rounds, torch_ms = f"{ours['ratio']['rounds']}", f"{theirs['median_ms']:.2f}"
            yield row(result["title"], rounds, torch_ms, *beside_torch(ours))


def equal_settings(report: Report) -> Iterator[str]:
    ours = ("minddp ms", "ratio", "95% interval")
    yield from header("workload", "setting", "torch ms", *ours, "by shared memory", *ours[1:])
    for result in report["workloads"].values():
        for setting in report["config"]["settings"]:
            found = [result["contestants"].get(f"minddp {setting}{by}") for by in ("", ", shared memory")]
            cells = [cell for contestant in found for cell in beside_torch(contestant)]
            theirs = result["contestants"][f"torch {setting}"]
            yield row(result["title"], setting, f"{theirs['median_ms']:.2f}", *cells)


def beside_torch(contestant: Report | None) -> list[str]:
    if contestant is None:
        return [""] * 3
    ratio = contestant["ratio"]
    return [f"{contestant['median_ms']:.2f}", f"{ratio['median']:.3f}", interval(ratio)]


def best_of_each(report: Report) -> Iterator[str]:
    """minddp's by the process group, and where that is another one, by any transport."""
    yield from header("workload", "torch's best", "minddp's best", "ratio", "95% interval")
    for result in report["workloads"].values():
        pairs = {pair["minddp"]: pair for pair in result["best"].values()}
        for ours, pair in pairs.items():
            yield row(
                result["title"], pair["torch"], ours, f"{pair['ratio']['median']:.3f}", interval(pair["ratio"])
            )


def everybody(report: Report) -> Iterator[str]:
    columns = ("ms", "exposed ms", "over floor", "speed-up", "efficiency", "examples/s")
    yield from header("workload", "contestant", *columns)
    for result in report["workloads"].values():
        for name, contestant in result["contestants"].items():
            yield row(
                result["title"],
                name,
                f"{contestant['median_ms']:.2f}",
                f"{contestant['exposed_ms']['median']:.2f}",
                f"{contestant['over_floor']['median']:.2f}",
                f"{contestant['speedup']['median']:.2f}",
                f"{contestant['efficiency']:.0%}",
                f"{contestant['examples_per_s']:.0f}",
            )


def memory(report: Report) -> str:
    lines = list(header("workload", "contestant", "peak MiB", "added / model", "copied / model"))
    for result in report["workloads"].values():
        for name, counted in result["contestants"].items():
            figures = f"{counted['peak_mib']:.1f}", f"{counted['added']:.2f}", f"{counted['copied']:.2f}"
            lines.append(row(result["title"], name, *figures))
    return "\n".join(lines)


def hook_cost(report: Report) -> str:
    columns = ("µs per parameter", "95% interval", "step ratio", "95% interval")
    lines = list(header("parameters", "contestant", *columns))
    for count, result in report["counts"].items():
        for name, contestant in result["contestants"].items():
            added, ratio = contestant["added_us"], contestant["ratio"]
            beside = ("", "") if name == contestant["baseline"] else (f"{ratio['median']:.3f}", interval(ratio))
            lines.append(row(f"{int(count):,}", name, f"{added['median']:.2f}", interval(added, digits=2), *beside))
    return "\n".join(lines)


def bucket_size(report: Report) -> str:
    lines = list(header("workload", "family", "bucket MiB", "ms", "ratio to torch", "95% interval"))
    for result in report["workloads"].values():
        for family, by_heat in result["families"].items():
            for heat, figured in by_heat.items():
                ratio = figured["ratio"]
                beside = ("", "") if family == "torch" else (f"{ratio['median']:.3f}", interval(ratio))
                lines.append(row(result["title"], family, heat, f"{figured['median_ms']['median']:.2f}", *beside))
    return "\n".join([*lines, "", *predictions(report)])


def predictions(report: Report) -> Iterator[str]:
    """A step by each plan as `bucket_cap_mb="auto"` predicts it, and as it was measured."""
    yield from header("workload", "family", "bucket MiB", "predicted ms", "measured ms", "error", "95% interval")
    for result in report["workloads"].values():
        for family, by_heat in result["families"].items():
            for heat, figured in by_heat.items():
                if figured["forecast"] is not None:
                    yield row(result["title"], family, heat, *forecast_cells(figured["forecast"]))


def header(*headings: str) -> Iterator[str]:
    yield row(*headings)
    yield "|" + "---|" * len(headings)


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES_OF_QUESTION: Mapping[str, Callable[[Report], str]] = {
    "versus_torch": versus_torch,
    "bucket_size": bucket_size,
    "hook_cost": hook_cost,
    "memory": memory,
}
