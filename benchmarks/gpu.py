"""On a GPU: what does a wrapper add to a step, in time, launches and memory, beside torch's own at its best?

    python -m benchmarks.gpu                 # all parts, some minutes; as many ranks as there are cards, over NCCL
    python -m benchmarks.gpu copies gpt2     # some parts; what the file says of others stays

Time is the device's, between two events around a turn; see [Note: paired rounds] for who races whom. Launches and
copies are counted in a profile of one step, memory is the allocator's peak over the first steps of each contestant
by itself. What was aimed at stands beside each figure. Needs neither torchvision nor tyro.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import contestants, machine, results
from benchmarks.accounting import peak_memory
from benchmarks.contestants import FLOOR, Contestant
from benchmarks.display import console_of, interval, table_of
from benchmarks.gpu_models import NAMES, gpu_workload
from benchmarks.harness import Estimate, Times, compare, estimate, fastest, median_ms, schedule
from benchmarks.launch import DeviceName, run_ranks
from benchmarks.workloads import Workload
from minddp.cupy_beside_torch import NoCuPy, import_cupy
from minddp.fused_pack import FusedPack, fused_pack_of

MIB = 2**20
PARTS = ("copies", *NAMES)
SETTINGS = ("default", "views", "static", "batched", "views_static")
FIRST_STEPS = 4  # buckets are rebuilt within
STEP_TARGETS = {"many_small": 0.90, "resnet50": 1.00, "gpt2": 1.00}
BARE_TARGETS = {"resnet50": 1.02}  # at one rank
COPY_TARGET = 0.85


def main(argv: Sequence[str] | None = None) -> int:
    options = _parsed(argv)
    console = console_of()
    if not (options.rehearse or torch.cuda.is_available()):
        console.print("No NVIDIA GPU here: nothing was measured.")
        return 0
    device: DeviceName = "cpu" if options.rehearse else "cuda"
    world_size = 1 if options.rehearse else torch.cuda.device_count()
    report = results.read(options.out) or {"parts": {}}
    report |= {"question": "what a wrapper adds to a step on a GPU", "machine": described(device)}
    for part in options.parts or PARTS:
        measure = measure_copies if part == "copies" else measure_workload
        limits: dict[str, Any] = {"world_size": world_size, "threads": 1, "timeout_s": options.timeout_s}
        done, *_ = run_ranks(measure, part, options, device, device=device, **limits)
        report["parts"][part] = done
        results.write(report, options.out)
        (print_copies if part == "copies" else print_workload)(done, console)
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"by default all of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=16, help="timed rounds")
    parser.add_argument("--warmup-rounds", type=int, default=2, help="rounds that are thrown away")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=results.path_of("gpu"))
    parser.add_argument("--timeout-s", type=float, default=600, help="of each part")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, to see that all runs")
    options = parser.parse_args(argv)
    if options.rehearse:
        options.rounds, options.warmup_rounds = 4, 1
    return options


def described(device: str) -> dict[str, Any]:
    """The machine, and the card with all that its figures depend on."""
    about = machine.describe(device)
    if device == "cpu":
        return about
    card = torch.cuda.get_device_properties(0)
    about |= {
        "gpu_memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    try:
        about["cupy"] = import_cupy().__version__
    except NoCuPy as obstacle:
        about["cupy"] = f"none: {obstacle}"
    return about


# ------------------------------------------------------------------ a workload, on each rank


def measure_workload(rank: int, name: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Each contestant by itself, then all in a race; ready for JSON."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    task = gpu_workload(name, tiny=options.rehearse)
    model = task.model().to(device)
    field = contestants_for(device)
    alone = {c.name: look_at(c, copy.deepcopy(model), task, rank) for c in field}
    models = contestants.enter(field, model)
    steps = {c.name: c.step(models[c.name], task, rank) for c in field}
    order = schedule(contestants.heats(field), options.warmup_rounds + options.rounds, options.seed)
    turns = race(steps, models, order, task.steps_per_turn, device)
    times = slowest(turns, options.warmup_rounds)
    parameters = list(model.parameters())
    return {
        "title": task.title,
        "ranks": dist.get_world_size(),
        "tensors": len(parameters),
        "gradient_mib": round(sum(p.nbytes for p in parameters) / MIB, 2),
        "contestants": {c.name: figures(c, times, alone, options.seed) for c in field},
        "targets": targets(name, field, times, alone, options.seed),
        "rounds_ms": {c: [round(1e3 * s, 4) for s in times[c]] for c in times},
    }


def contestants_for(device: str) -> list[Contestant]:
    """No wrapper, and at each setting torch, then minddp by the process group and, on a GPU, straight on NCCL."""
    settings = [s for s in SETTINGS if s not in contestants.unknown_to_torch(SETTINGS)]
    transports = ["process_group"]
    if device == "cuda" and has_cupy():
        transports.append("nccl")
    return [Contestant(FLOOR, "floors"), *contestants.pairs(settings, transports)]


def has_cupy() -> bool:
    try:
        return import_cupy() is not None
    except NoCuPy:
        return False


def look_at(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> dict[str, float]:
    """Its peak of memory beyond the parameters, and the launches and copies of one of its steps."""
    gc.collect()
    with peak_memory(next(model.parameters()).device) as peak:
        step = contestant.step(contestant.wrap(model), task, rank)
        for _ in range(FIRST_STEPS):
            step()
    return {"peak_mib": round(peak.nbytes / MIB, 2)} | calls_of(step)


def calls_of(step: Callable[[], object]) -> dict[str, int]:
    """How often one step launches a kernel, and has memory copied or set."""
    if not torch.cuda.is_available():
        step()
        return {"launches": 0, "copies": 0}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    return {
        "launches": sum("LaunchKernel" in name or "GraphLaunch" in name for name in names),
        "copies": sum(name.startswith(("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")) for name in names),
    }


def race(
    steps: Mapping[str, Callable[[], object]],
    models: Mapping[str, nn.Module],
    order: Sequence[Sequence[str]],
    steps_per_turn: int,
    device: str,
) -> dict[str, list[float]]:
    """Seconds per step of each contestant, round by round, on this rank. See [Note: paired rounds]."""
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for names in order:
        for name in names:
            gc.collect()
            steps[name]()
            dist.barrier()
            with stopwatch(device) as took:
                for _ in range(steps_per_turn):
                    steps[name]()
            turns[name].append(took[0] / steps_per_turn)
            models[name].zero_grad(set_to_none=True)
    return turns


@contextmanager
def stopwatch(device: str) -> Iterator[list[float]]:
    """Yields a list whose only element is, afterwards, how many seconds the device took."""
    took: list[float] = []
    if device == "cpu":
        began = time.perf_counter()
        yield took
        took.append(time.perf_counter() - began)
        return
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    yield took
    last.record()
    torch.cuda.synchronize()
    took.append(first.elapsed_time(last) / 1e3)


def slowest(turns: Mapping[str, Sequence[float]], warmup_rounds: int) -> dict[str, np.ndarray]:
    """In each round that counts, the time of the slowest rank. Collective."""
    of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, {name: list(seconds[warmup_rounds:]) for name, seconds in turns.items()})
    return {name: np.max([seconds[name] for seconds in of_rank], axis=0) for name in turns}


# ------------------------------------------------------------------ arithmetic


def figures(contestant: Contestant, times: Times, alone: Mapping[str, Any], seed: int) -> dict[str, Any]:
    name = contestant.name
    own: dict[str, Any] = {"median_ms": median_ms(times[name]), **alone[name]}
    own["over_bare"] = dataclasses.asdict(compare(times[name], times[FLOOR], seed))
    if contestant.baseline is not None:
        own["baseline"] = contestant.baseline
        own["ratio"] = dataclasses.asdict(compare(times[name], times[contestant.baseline], seed))
    return own


def targets(
    name: str, field: Sequence[Contestant], times: Times, alone: Mapping[str, Any], seed: int
) -> list[dict[str, Any]]:
    """What was aimed at, and what it is. The fastest are chosen in every other round and timed in the rest."""
    choosing = {c: seconds[::2] for c, seconds in times.items()}
    torchs = [c.name for c in field if c.name == c.baseline]
    ours = [c.name for c in field if c.baseline is not None and c.name != c.baseline]
    best_torch, best_ours = fastest(choosing, torchs), fastest(choosing, ours)
    beside = compare(times[best_ours][1::2], times[best_torch][1::2], seed)
    sides = (contestants.candidate, contestants.native)
    our_peak, their_peak = (alone[side("views")]["peak_mib"] for side in sides)
    our_launches, their_launches = (alone[side]["launches"] for side in (best_ours, best_torch))
    found = [
        aim(f"step time: {best_ours} beside {best_torch}", beside.median, STEP_TARGETS[name], beside),
        aim("peak memory with views beside torch's", ratio(our_peak, their_peak), 1.00),
        aim(f"launches: {best_ours} beside {best_torch}", ratio(our_launches, their_launches), 1.00),
    ]
    if name in BARE_TARGETS and dist.get_world_size() == 1:
        bare = compare(times[best_ours][1::2], times[FLOOR][1::2], seed)
        what = f"step time: {best_ours} beside no wrapper"
        found.append(aim(what, bare.median, BARE_TARGETS[name], bare))
    return found


def ratio(ours: float, theirs: float) -> float:
    """1 where both are nothing."""
    return ours / theirs if theirs else float(ours == theirs) or float("inf")


def aim(what: str, value: float, limit: float, within: Estimate | None = None) -> dict[str, Any]:
    """A figure that was to be at most `limit`."""
    span = {} if within is None else {"low": within.low, "high": within.high}
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit} | span


# ------------------------------------------------------------------ copies


def measure_copies(rank: int, part: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Bytes moved per second, read and written both: by a plain copy, by the fused pack, and by torch's kernels."""
    sizes = [1] if options.rehearse else [25, 100, 400]
    rows = []
    for size in sizes:
        copied = plain_copy(size, options, device)
        rows.append(copied)
        for shape in ("large", "small"):
            for grad, bucket in (
                (torch.float32, torch.float32),
                (torch.bfloat16, torch.bfloat16),
                (torch.float32, torch.bfloat16),
            ):
                rows += packing(size, shape, grad, bucket, options, device, copied["gb_per_s"])
    return {"title": "Copies and packing", "ranks": dist.get_world_size(), "rows": rows}


def plain_copy(size: int, options: argparse.Namespace, device: str) -> dict[str, Any]:
    sets = copies_beyond_cache(size, options)
    sources = [torch.randn(size * MIB // 4, device=device) for _ in range(sets)]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    seconds = timed([partial(target.copy_, source) for source, target in pairs], options, device)
    return {"what": "copy", "mib": size, "gb_per_s": 2 * size * MIB / seconds / 1e9}


def packing(
    size: int,
    shape: str,
    grad: torch.dtype,
    bucket: torch.dtype,
    options: argparse.Namespace,
    device: str,
    copy_rate: float,
) -> list[dict[str, Any]]:
    """The fused pack, where it can be had, its inverse, and torch's kernels, into a bucket of `size` MiB."""
    numels = gradient_sizes(shape, size * MIB // bucket.itemsize)
    moved = sum(numels) * (grad.itemsize + bucket.itemsize)
    runs: dict[str, list[Callable[[], object]]] = {"fused pack": [], "fused unpack": [], "torch's kernels": []}
    launches = 0
    for _ in range(copies_beyond_cache(size, options)):
        flat = torch.empty(sum(numels), dtype=bucket, device=device)
        views = list(flat.split(numels))
        grads = [torch.randn(numel, device=device).to(grad) for numel in numels]
        fused = fused_pack_of(views, grad)
        if fused is not None:
            launches = fused.num_launches
            runs["fused pack"].append(partial(gathered, fused, grads))
            runs["fused unpack"].append(partial(fused.scatter, grads))
        runs["torch's kernels"].append(partial(copied_and_scaled, views, grads, flat))
    described = f"{shape}, {str(grad)[6:]} to {str(bucket)[6:]}"
    found = []
    for what, calls in runs.items():
        if calls:
            rate = moved / timed(calls, options, device) / 1e9
            row = {"what": what, "mib": size, "gradients": described, "tensors": len(numels), "gb_per_s": rate}
            row |= {"of_copy": rate / copy_rate} | ({"launches": launches} if what != "torch's kernels" else {})
            if what == "fused pack":
                row |= {"at_least": COPY_TARGET, "met": rate / copy_rate >= COPY_TARGET}
            found.append(row)
    return found


def gradient_sizes(shape: str, numel: int) -> list[int]:
    """`large`: a few matrices and their biases, at odd places; `small`: many of 16 KiB and less."""
    pattern = [1_048_576, 1024, 2_359_296, 1000] if shape == "large" else [4096, 64, 1024, 10]
    sizes: list[int] = []
    while sum(sizes) < numel:
        sizes.append(min(pattern[len(sizes) % 4], numel - sum(sizes)))
    return sizes if len(sizes) > 1 else [numel // 2, numel - numel // 2]


def gathered(fused: FusedPack, grads: Sequence[Tensor]) -> None:
    assert fused.gather(grads, 1 / 3)


def copied_and_scaled(views: list[Tensor], grads: list[Tensor], flat: Tensor) -> None:
    torch._foreach_copy_(views, grads)
    flat.mul_(1 / 3)


def copies_beyond_cache(size: int, options: argparse.Namespace) -> int:
    """How many sets of buffers to go through in turn, so that none is still in the second-level cache."""
    return 1 if options.rehearse else max(2, 400 // size)


def timed(calls: Sequence[Callable[[], object]], options: argparse.Namespace, device: str) -> float:
    """Seconds of one call: the median over rounds, each of which makes every call."""
    took = []
    for number in range(options.warmup_rounds + options.rounds):
        with stopwatch(device) as seconds:
            for call in calls:
                call()
        if number >= options.warmup_rounds:
            took.append(seconds[0] / len(calls))
    return estimate(np.array(took), options.seed).median


# ------------------------------------------------------------------ on the terminal


def print_workload(done: Mapping[str, Any], console: Console) -> None:
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
            f"{own['over_bare']['median']:.3f}",
            f"{own['launches']}",
            f"{own['copies']}",
            f"{own['peak_mib']:.1f}",
        )
    console.print(rows)
    for one in done["targets"]:
        span = f" ({interval(one)})" if "low" in one else ""
        verdict = "met" if one["met"] else "MISSED"
        console.print(f"  {one['what']}: {one['value']:.3f}{span}, aim at most {one['at_most']:.2f}: {verdict}")


def print_copies(done: Mapping[str, Any], console: Console) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
