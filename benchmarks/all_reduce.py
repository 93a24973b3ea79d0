"""How long does an all-reduce take in shared memory, as a multiple of gloo's time?

    python -m benchmarks.all_reduce            # about half a minute
    python -m benchmarks.all_reduce --world-size 4 --sizes-kib 64 1024

Each message size is a race of its own: over the process group; in shared memory, of a tensor that is *resident*
there, as buckets are; and of one that lies elsewhere and is *copied* in and out. Timed is one all-reduce, begun and
waited for, with nothing else to do. See [Note: paired rounds] for how the ratio is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import compare, median_ms, timed_race
from benchmarks.question import RaceOptions, ask, report_of
from minddp.transport import Transport, open_transport

BASELINE = "process group"
RESIDENT = "resident"
COPIED = "copied"
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time an all-reduce in shared memory beside the process group's."""

    LEAST = RaceOptions.LEAST | {"world_size": 2}

    sizes_kib: tuple[float, ...] = (4, 64, 1024, 25 * 1024)
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    turn_mib: float = 50.0
    """How many bytes to reduce in a turn; but at least 2 messages and at most 100."""
    rounds: int = 24
    """Timed rounds."""
    warmup_rounds: int = 3
    """Rounds thrown away."""
    timeout_s: float = 300.0
    """Give up, and end the ranks, after this long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes_kib or min(self.sizes_kib) <= 0:
            raise ValueError(f"sizes_kib is {self.sizes_kib}; give at least one size, all above 0.")


def main(config: Config) -> None:
    ask("all_reduce", time_sizes, config, print_report)


def time_sizes(rank: int, config: Config) -> dict[str, Any]:
    """One race for each size, on this rank; returns the report, ready for JSON."""
    group = dist.distributed_c10d._get_default_group()
    over_group = open_transport("process_group", group)
    shared = open_transport("shared_memory", group)
    return report_of(
        "time of an all-reduce in shared memory as a multiple of the process group's",
        config,
        sizes=[time_size(rank, config, kib, over_group, shared) for kib in config.sizes_kib],
    )


def time_size(rank: int, config: Config, kib: float, over_group: Transport, shared: Transport) -> dict[str, Any]:
    """Race the transports with messages of one size, after a check that they agree."""
    dtype = getattr(torch, config.dtype)
    numel = max(1, int(kib * 1024) // dtype.itemsize)
    tensors = {
        BASELINE: torch.empty(numel, dtype=dtype),
        RESIDENT: shared.allocate(numel, dtype, CPU),
        COPIED: torch.empty(numel, dtype=dtype),
    }
    transports = {BASELINE: over_group, RESIDENT: shared, COPIED: shared}
    all_reduces = {name: all_reduce(transports[name], tensors[name]) for name in tensors}
    same_bits = agree(all_reduces, tensors, config.seed + rank)
    for tensor in tensors.values():
        tensor.zero_()  # whose sums stay finite, however often they are taken
    repeats = min(100, max(2, int(config.turn_mib * 1024 / kib)))
    wall, cpu = timed_race(all_reduces, [list(tensors)], config.race_rounds, repeats)
    return {
        "kib": kib,
        "same_bits": same_bits,
        "median_ms": {name: round(median_ms(wall[name]), 5) for name in wall},
        "median_cpu_ms": {name: round(median_ms(cpu[name]), 5) for name in cpu},
        "ratios": {
            name: dataclasses.asdict(compare(wall[name], wall[BASELINE], config.seed))
            for name in (RESIDENT, COPIED)
        },
        "cpu_ratios": {
            name: dataclasses.asdict(compare(cpu[name], cpu[BASELINE], config.seed)) for name in (RESIDENT, COPIED)
        },
    }


def all_reduce(transport: Transport, tensor: Tensor) -> Callable[[], object]:
    return lambda: transport.all_reduce(tensor).wait()


def agree(all_reduces: Mapping[str, Callable[[], object]], tensors: Mapping[str, Tensor], seed: int) -> bool:
    """Whether all transports add the same numbers up to the same bits."""
    values = torch.randn(tensors[BASELINE].shape, generator=torch.Generator().manual_seed(seed))
    for name, tensor in tensors.items():
        tensor.copy_(values)
        all_reduces[name]()
    return all(torch.equal(tensor, tensors[BASELINE]) for tensor in tensors.values())


def print_report(report: Mapping[str, Any], console: Console) -> None:
    config = report["config"]
    table = Table(title=f"All-reduce of {config['dtype']} on {config['world_size']} ranks")
    table.add_column("KiB", justify="right", no_wrap=True)
    table.add_column("transport", no_wrap=True)
    for heading in ("ms", "GiB/s", "ratio", "95% interval", "cpu"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in report["sizes"]:
        for name, ms in result["median_ms"].items():
            gib_per_s = result["kib"] / 2**20 / (ms / 1e3)
            row = [f"{result['kib']:g}", name, f"{ms:.3f}", f"{gib_per_s:.2f}"]
            if name != BASELINE:
                ratio, cpu_ratio = result["ratios"][name], result["cpu_ratios"][name]
                row += [
                    f"{ratio['median']:.3f}",
                    f"{ratio['low']:.3f}–{ratio['high']:.3f}",
                    f"{cpu_ratio['median']:.3f}",
                ]
            table.add_row(*row)
        table.add_section()
    console.print(table)
    same_bits = all(result["same_bits"] for result in report["sizes"])
    console.print("All sums are equal to the bit." if same_bits else "The sums DIFFER between transports.")


if __name__ == "__main__":
    main(tyro.cli(Config))
