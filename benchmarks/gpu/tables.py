"""What was measured on a GPU, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks.display import interval, table_of


def of_steps(done: Mapping[str, Any], console: Console) -> None:
    rows = table_of(
        f"{done['title']}: {done['tensors']:,} tensors, {done['gradient_mib']} MiB, {done['ranks']} ranks",
        "contestant",
        *("ms", "beside torch", "95% interval", "beside no wrapper", "launches", "copies", "peak MiB"),
    )
    for name, own in done["contestants"].items():
        pair = own.get("ratio")
        is_ours = pair is not None and own["baseline"] != name
        rows.add_row(
            name,
            f"{own['median_ms']:.3f}",
            f"{pair['median']:.3f}" if is_ours else "",
            interval(pair) if is_ours else "",
            f"{own['over_bare']['median']:.3f}" if "over_bare" in own else "",
            f"{own['launches']}",
            f"{own['copies']}",
            f"{own['peak_mib']:.1f}",
        )
    console.print(rows)
    for name, error in done["failed"].items():
        console.print(f"  {name} FAILED and did not race: {error}", markup=False)
    for one in done["targets"]:
        span = f" ({interval(one)})" if "low" in one else ""
        verdict = "met" if one["met"] else "MISSED"
        console.print(f"  {one['what']}: {one['value']:.3f}{span}, aim at most {one['at_most']:.2f}: {verdict}")


def of_copies(done: Mapping[str, Any], console: Console) -> None:
    rows = table_of(done["title"], "what", "MiB", "gradients", "tensors", "launches", "GB/s", "of a copy", "aim")
    for row in done["rows"]:
        aimed = f"{row['at_least']:.2f} {'met' if row['met'] else 'MISSED'}" if "met" in row else ""
        rows.add_row(
            row["what"],
            f"{row['mib']}",
            row.get("gradients", ""),
            f"{row.get('tensors', '')}",
            f"{row.get('launches', '')}",
            f"{row['gb_per_s']:.0f}",
            f"{row['of_copy']:.2f}" if "of_copy" in row else "",
            aimed,
        )
    console.print(rows)
    if not any(row["what"] == "fused pack" for row in done["rows"]):
        console.print("  No fused pack here: without CuPy, or a kernel that does not compile. The log says which.")
