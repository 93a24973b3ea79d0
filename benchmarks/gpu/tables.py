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
