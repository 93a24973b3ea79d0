"""On a GPU: what does a wrapper add to a step, in time, launches and memory, beside torch's own at its best?

    python -m benchmarks.gpu                           # all workloads, some minutes; a rank for each GPU, over NCCL
    python -m benchmarks.gpu convnet transformer       # some of them; the file keeps the figures of others

Time is wall time from an idle device to an idle device; see [Note: paired rounds] for the race. Kernels and copies
are counted in a profile of one step, memory is the allocator's peak over the first steps of each contestant by
itself.

[Note: failures are left out]
Time on a GPU is short, and one contestant that cannot run there (a transport without its library, say) must not
take the others' figures with it. A contestant that fails by itself, on any rank, is reported with its error and
does not race. And a race has only as many rounds as fit into its time: fewer rounds only widen the interval.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import contestants, machine
from benchmarks.contestants import FLOOR, Contestant, SettingName
from benchmarks.display import RATIO, Table, console_of, table_of
from benchmarks.harness import Rounds, gathered, in_ms
from benchmarks.launch import DeviceName, run_ranks
from benchmarks.question import RaceOptions, Report, path_of, read, report_of, write
from benchmarks.race import Raced, race_workload
from benchmarks.workloads import Size, Workload, WorkloadName, workload

WORKLOADS = ("many_small", "convnet", "transformer")
SETTINGS: tuple[SettingName, ...] = ("default", "views", "static", "batched", "views_static")
MIB = 2**20
FIRST_STEPS = 4  # buckets are rebuilt within


@dataclass(frozen=True, kw_only=True)
class GpuOptions(RaceOptions):
    """`device` is "cpu" in a rehearsal."""

    race_s: float
    device: DeviceName

    @property
    def workload_size(self) -> Size:
        return "tiny" if self.size == "smoke" else "gpu"

    @property
    def race_rounds(self) -> Rounds:
        return dataclasses.replace(super().race_rounds, limit_s=self.race_s)


def main(argv: Sequence[str] | None = None) -> int:
    given, console = _parsed(argv), console_of()
    if not (given.rehearse or torch.cuda.is_available()):
        console.print("No NVIDIA GPU here: nothing was measured.")
        return 0
    options = GpuOptions(
        rounds=given.rounds,
        race_s=given.race_s,
        timeout_s=given.timeout_s,
        out=given.out,
        size="smoke" if given.rehearse else "full",
        device="cpu" if given.rehearse else "cuda",
        world_size=1 if given.rehearse else torch.cuda.device_count(),
    )
    known = read(given.out) or {"parts": {}}
    question = "time, launches and memory that a wrapper adds to a step on a GPU"
    for name in given.workloads or WORKLOADS:
        known["parts"][name], *_ = run_ranks(
            measure,
            name,
            options,
            world_size=options.world_size,
            threads=options.threads,
            timeout_s=options.timeout_s,
            device=options.device,
        )
        report = report_of(question, options, options.device, parts=known["parts"])
        write(report, given.out)
        for table in tables(report["parts"][name]):
            table.show(console)
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """By argparse: a machine with a GPU may lack tyro."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], help="by default all of them")
    parser.add_argument("--rounds", type=int, default=16, help="timed rounds")
    parser.add_argument("--race-s", type=float, default=120, help="a race has only as many rounds as take so long")
    parser.add_argument("--out", type=Path, default=path_of("gpu"))
    parser.add_argument("--timeout-s", type=float, default=600, help="of each workload: its ranks are ended then")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, to see that all runs")
    return parser.parse_args(argv)


# ------------------------------------------------------------------ on each rank


def measure(rank: int, name: WorkloadName, options: GpuOptions) -> dict[str, Any]:
    """All figures of the workload `name`, ready for JSON."""
    torch.set_float32_matmul_precision("high")
    task = workload(name, options.workload_size)
    model, entrants = task.model().to(options.device), contestants_for(options.device)
    alone = {c.name: look_at(c, copy.deepcopy(model), task, rank) for c in entrants}
    failed = {contestant: found["error"] for contestant, found in alone.items() if "error" in found}
    field = [c for c in entrants if c.name not in failed and c.baseline not in failed]
    raced = race_workload(rank, task, field, options, device=options.device)
    return raced.described() | {
        "ranks": options.world_size,
        "contestants": {c.name: figures(c, raced) | alone[c.name] for c in field},
        "failed": failed,
        "rounds_ms": in_ms(raced.wall),
    }


def contestants_for(device: str) -> list[Contestant]:
    """No wrapper, and at each setting torch, then minddp by the process group and, on a GPU, straight on NCCL."""
    settings = contestants.supported(SETTINGS)
    has_nccl = device == "cuda" and not machine.cupy_version().startswith("none")
    pairs = contestants.pairs(settings, ["process_group", "nccl"] if has_nccl else ["process_group"])
    return [Contestant(FLOOR, "floors"), *pairs]


def look_at(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> dict[str, Any]:
    """Its peak of memory beyond the parameters, and the work of one of its steps; or the `error` of some rank."""
    gc.collect()
    error: str | None = None
    found: dict[str, Any] = {}
    try:
        before = torch.cuda.memory_allocated()  # 0 without a GPU, as the peak then is
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        step = contestant.step(contestant.wrap(model), task, rank)
        for _ in range(FIRST_STEPS):
            step()
        peak = torch.cuda.max_memory_allocated() - before
        found = {"peak_mib": round(peak / MIB, 2)} | work_of(step)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    errors = [f"rank {r}: {text}"[:1000] for r, text in enumerate(gathered(error)) if text is not None]
    found |= {"error": errors[0]} if errors else {}
    if rank == 0:
        print(f"{task.name}, {contestant.name}: {found}", flush=True)  # kept in the log if a later one hangs
    return found


def work_of(step: Callable[[], object]) -> dict[str, int]:
    """The numbers of kernels that one step launches, and of memory copies and sets."""
    if not torch.cuda.is_available():
        step()
        return {"launches": 0, "copies": 0}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return counted(profiled.events())


def counted(events: Iterable[Any]) -> dict[str, int]:
    """The device's work in a profile's `events`.

    It is counted there, not on the host: torch launches through the runtime, CuPy and NCCL through the driver, and
    a profile may hold one launch twice. A span that the host has named is among the device's events, too.
    """
    seen = list(events)
    on_host = {event.name for event in seen if event.device_type.name == "CPU"}
    on_device = [e.name for e in seen if e.device_type.name == "CUDA" and e.name not in on_host]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in on_device)
    return {"launches": len(on_device) - copies, "copies": copies}


def figures(contestant: Contestant, raced: Raced) -> dict[str, Any]:
    """Times beside no wrapper and beside torch's at the same setting, unless those have failed."""
    name, baseline = contestant.name, contestant.baseline or FLOOR
    own = {"baseline": baseline, "median_ms": raced.median_ms(name), "ratio": raced.ratio(name, baseline)}
    return own | ({"over_bare": raced.ratio(name, FLOOR)} if FLOOR in raced.wall else {})


def tables(measured: Report) -> Iterator[Table]:
    columns = {
        "ms": "{median_ms:.3f}",
        "beside": "{baseline}",
        "ratio": RATIO,
        "launches": "{launches}",
        "copies": "{copies}",
        "peak MiB": "{peak_mib:.1f}",
    }
    size = f"{measured['tensors']:,} tensors, {measured['gradient_mib']} MiB, {measured['ranks']} ranks"
    caption = "\n".join(f"{name} FAILED and did not race: {error}" for name, error in measured["failed"].items())
    yield table_of(f"{measured['title']}: {size}", "contestant", columns, measured["contestants"], caption)


if __name__ == "__main__":
    sys.exit(main())
