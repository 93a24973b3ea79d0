"""How long does an all-reduce take in shared memory, as a multiple of gloo's time?

    python -m benchmarks all_reduce            # about half a minute
    python -m benchmarks all_reduce --world-size 4 --sizes-kib 64 1024

Each message size is a race of its own: over the process group; in shared memory, of a tensor that is *resident*
there, as buckets are; and of one that lies elsewhere and is *copied* in and out. The time is that of launching one
all-reduce and waiting for it, with nothing else to do. See [Note: paired rounds] for how the ratio is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.display import RATIO, Table, table_of
from benchmarks.harness import compare, median_ms, timed_race
from benchmarks.question import RaceOptions, Report, ask, report_of
from minddp.transport import Transport, open_transport

BASELINE = "process group"
RESIDENT = "resident"
COPIED = "copied"
CPU = torch.device("cpu")
TURN_KIB = 50 * 1024  # a turn reduces so many bytes, but at least 2 messages and at most 100


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time an all-reduce in shared memory beside the process group's."""

    LEAST = RaceOptions.LEAST | {"world_size": 2}

    sizes_kib: tuple[float, ...] = (4, 64, 1024, 25 * 1024)
    rounds: int = 24
    warmup_rounds: int = 3
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes_kib or min(self.sizes_kib) <= 0:
            raise ValueError(f"sizes_kib is {self.sizes_kib}; give at least one size, all above 0.")


def main(config: Config) -> None:
    ask("all_reduce", time_sizes, config, tables)


def time_sizes(rank: int, config: Config) -> dict[str, Any]:
    """One race for each size, on this rank; returns the report."""
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
    numel = max(1, int(kib * 1024) // 4)
    tensors = {
        BASELINE: torch.empty(numel),
        RESIDENT: shared.allocate(numel, torch.float32, CPU),
        COPIED: torch.empty(numel),
    }
    transports = {BASELINE: over_group, RESIDENT: shared, COPIED: shared}
    all_reduces = {name: all_reduce(transports[name], tensors[name]) for name in tensors}
    same_bits = agree(all_reduces, tensors, config.seed + rank)
    for tensor in tensors.values():
        tensor.zero_()  # repeated sums of zeros stay finite
    repeats = config.turn(min(100, max(2, int(TURN_KIB / kib))))
    wall = timed_race(all_reduces, [list(tensors)], config.race_rounds, repeats)
    return {
        "kib": kib,
        "same_bits": same_bits,
        "median_ms": {name: round(median_ms(wall[name]), 5) for name in wall},
        "ratios": {name: compare(wall[name], wall[BASELINE], config.seed) for name in wall},
    }


def all_reduce(transport: Transport, tensor: Tensor) -> Callable[[], object]:
    return lambda: transport.all_reduce(tensor).wait()


def agree(all_reduces: Mapping[str, Callable[[], object]], tensors: Mapping[str, Tensor], seed: int) -> bool:
    """True if all transports add the same numbers up to the same bits."""
    values = torch.randn(tensors[BASELINE].shape, generator=torch.Generator().manual_seed(seed))
    for name, tensor in tensors.items():
        tensor.copy_(values)
        all_reduces[name]()
    return all(torch.equal(tensor, tensors[BASELINE]) for tensor in tensors.values())


def tables(report: Report) -> Iterator[Table]:
    columns = {"ms": "{ms:.3f}", "GiB/s": "{rate:.2f}", "ratio": RATIO}
    for result in report["sizes"]:
        figures = {
            name: {"ms": ms, "rate": result["kib"] / 2**20 / (ms / 1e3), "ratio": result["ratios"][name]}
            for name, ms in result["median_ms"].items()
        }
        title = f"{result['kib']:,g} KiB of float32"
        caption = "All sums are equal to the bit." if result["same_bits"] else "The sums DIFFER between transports."
        yield table_of(title, "transport", columns, figures, caption)
