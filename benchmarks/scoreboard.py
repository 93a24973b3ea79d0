"""How the standings of `versus_torch` look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import ALONE, AS_IT_COMES, FLOOR
from benchmarks.display import interval, table_of

AS_IT_COMES_IN_WORDS = "* as it comes: minddp.DistributedDataParallel(model)"


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """One table for each workload, then what they say together."""
    for result in report["workloads"].values():
        console.print(table(result, report["seat"]))
        console.print(f"  {floors_in_words(result['floors'])}; {weights_in_words(result['contestants'])}.")
        for transport, pair in result["best"].items():
            console.print(
                f"  best by {transport.replace('_', ' ')}: {pair['minddp']} against {pair['torch']}: "
                f"{pair['ratio']['median']:.3f} ({interval(pair['ratio'])})"
            )
    console.print(f"A barrier takes {report['barrier_us']['median']:.0f} µs.")
    console.print("Across workloads, time relative to torch at equal settings (median, worst):")
    for name, across in report["across_workloads"].items():
        console.print(f"  {name:32} {across['median']:.3f}x  {across['worst']:.3f}x")


def table(result: Mapping[str, Any], seat: str) -> Table:
    rows = table_of(
        f"{result['title']}: {result['tensors']} tensors, {result['gradient_mib']} MiB; {result['rounds']} rounds",
        "contestant",
        *("ms", "ratio", "95% interval", "spread", "cpu", "exposed ms", "over floor", "speed-up", "examples/s"),
        caption=AS_IT_COMES_IN_WORDS if AS_IT_COMES in result["contestants"] else None,
    )
    baseline = None
    for name, contestant in result["contestants"].items():
        if contestant["baseline"] != baseline:
            baseline = contestant["baseline"]
            rows.add_section()
        shown, style = (f"{name} *", "bold") if name == AS_IT_COMES else (name.replace("minddp", seat), None)
        rows.add_row(shown, *_cells(contestant, is_baseline=name == baseline), style=style)
    return rows


def floors_in_words(floors: Mapping[str, Any]) -> str:
    wires = ", ".join(f"by {t.replace('_', ' ')} {ms:.2f}" for t, ms in floors["all_reduce_ms"].items())
    alone, bare = floors["one_rank_alone_ms"], floors["no_wrapper_ms"]
    return f"ms per step: {ALONE} {alone:.2f}, {FLOOR} {bare:.2f}, all-reduce only {wires}"


def weights_in_words(contestants: Mapping[str, Any]) -> str:
    differ = [name for name, contestant in contestants.items() if not contestant["same_bits"]]
    return f"weights DIFFER from torch's: {', '.join(differ)}" if differ else "all weights equal to the bit"


def _cells(contestant: Mapping[str, Any], *, is_baseline: bool) -> list[str]:
    ratio = contestant["ratio"]
    beside_torch = [
        f"{ratio['median']:.3f}",
        interval(ratio),
        f"{ratio['spread']:.3f}",
        f"{contestant['cpu_ratio']['median']:.3f}",
    ]
    return [
        f"{contestant['median_ms']:.2f}",
        *([""] * 4 if is_baseline else beside_torch),
        f"{contestant['exposed_ms']['median']:.2f}",
        f"{contestant['over_floor']['median']:.2f}",
        f"{contestant['speedup']['median']:.2f}",
        f"{contestant['examples_per_s']:.0f}",
    ]
