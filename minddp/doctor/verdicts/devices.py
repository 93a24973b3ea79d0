"""Has each rank a device of its own?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, by_value, count, differing, name_ranks, size

CHECK = "devices"
_MOSTLY_FREE = 0.8

Device = Literal["auto", "cpu", "cuda"]


def choose_device(wanted: Device, facts: Mapping[int, RankFacts]) -> Literal["cpu", "cuda"]:
    """GPUs if each rank has one of its own, unless the CPU is `wanted`."""
    if wanted == "cpu" or _without(facts) or _shared(facts):
        return "cpu"
    return "cuda"


def judge_devices(wanted: Device, facts: Mapping[int, RankFacts]) -> list[Finding]:
    found = [*_unusable(wanted, facts), *_too_few(wanted, facts)]
    if choose_device(wanted, facts) == "cuda":
        found += [*_unlike(facts), *_occupied(facts)]
    return found or [_fine(wanted, facts)]


def _without(facts: Mapping[int, RankFacts]) -> list[int]:
    return [rank for rank, told in facts.items() if told.own_gpu is None]


def _shared(facts: Mapping[int, RankFacts]) -> dict[str, list[int]]:
    """GPUs that are the only choice of several ranks."""
    own = {rank: told.own_gpu.uuid for rank, told in facts.items() if told.own_gpu is not None}
    return {uuid: ranks for uuid, ranks in by_value(own).items() if len(ranks) > 1}


def _unusable(wanted: Device, facts: Mapping[int, RankFacts]) -> Iterator[Finding]:
    """Hosts with NVIDIA GPUs that torch does not see."""
    if wanted == "cpu":
        return
    blind = {rank: told for rank, told in facts.items() if told.devices.driver_is_there and not told.devices.gpus}
    for host, ranks in by_value({rank: told.machine.name for rank, told in blind.items()}).items():
        told = facts[ranks[0]]
        hidden = told.software.environment.get("CUDA_VISIBLE_DEVICES")
        why, remedy = "", "Run nvidia-smi there: the driver may be too old for this torch, or the GPU be lost."
        if not told.devices.torch_has_cuda:
            why, remedy = (
                "its torch is built for CPUs",
                "Install torch for CUDA there (pytorch.org has the command).",
            )
        elif hidden is not None:
            why, remedy = f"CUDA_VISIBLE_DEVICES={hidden!r}", "Unset CUDA_VISIBLE_DEVICES there, or list its GPUs."
        fact = f"{host} has an NVIDIA driver, but torch sees no GPU on {name_ranks(ranks)}"
        yield Finding(CHECK, Verdict.NOTE, f"{fact}: {why}." if why else f"{fact}.", remedy)


def _too_few(wanted: Device, facts: Mapping[int, RankFacts]) -> Iterator[Finding]:
    without, shared = _without(facts), _shared(facts)
    if wanted == "cpu" or (wanted == "auto" and len(without) == len(facts)):
        return
    verdict = Verdict.BROKEN if wanted == "cuda" else Verdict.NOTE
    instead = "" if wanted == "cuda" else " The checks below use the CPU and gloo."
    if without:
        yield Finding(
            CHECK,
            verdict,
            f"{name_ranks(without).capitalize()} {'has' if len(without) == 1 else 'have'} no GPU.{instead}",
            "Start as many ranks on each host as it has GPUs (--nproc-per-node), or train on the CPU.",
        )
    for ranks in shared.values():
        gpu = facts[ranks[0]].own_gpu
        yield Finding(
            CHECK,
            verdict,
            f"{name_ranks(ranks).capitalize()} would share one GPU, {gpu.name if gpu else ''} of "
            f"{facts[ranks[0]].machine.name}, which NCCL refuses.{instead}",
            "Start as many ranks on each host as it has GPUs (--nproc-per-node); see that LOCAL_RANK and "
            "CUDA_VISIBLE_DEVICES give each rank another one.",
        )


def _unlike(facts: Mapping[int, RankFacts]) -> Iterator[Finding]:
    names = {rank: told.own_gpu.name for rank, told in facts.items() if told.own_gpu is not None}
    if len(set(names.values())) > 1:
        yield Finding(
            CHECK,
            Verdict.NOTE,
            f"The GPUs are not alike: {differing(names)}.",
            "All ranks wait for the slowest in every step; give it less, or use GPUs of one kind.",
        )


def _occupied(facts: Mapping[int, RankFacts]) -> Iterator[Finding]:
    for rank, told in facts.items():
        gpu = told.own_gpu
        if gpu is not None and gpu.free_bytes is not None and gpu.free_bytes < _MOSTLY_FREE * gpu.memory_bytes:
            yield Finding(
                CHECK,
                Verdict.NOTE,
                f"The GPU of rank {rank} on {told.machine.name} has {size(gpu.free_bytes)} free of "
                f"{size(gpu.memory_bytes)}: somebody else uses it.",
                "nvidia-smi names the processes there; an earlier job may not have ended.",
            )


def _fine(wanted: Device, facts: Mapping[int, RankFacts]) -> Finding:
    if choose_device(wanted, facts) == "cpu":
        asked = "as asked for with --device cpu" if wanted == "cpu" else "no rank sees a GPU"
        return Finding(CHECK, Verdict.FINE, f"The CPU, with gloo: {asked}.")
    names = sorted({told.own_gpu.name for told in facts.values() if told.own_gpu is not None})
    return Finding(
        CHECK, Verdict.FINE, f"Each of {count(len(facts), 'rank')} has a GPU of its own: {', '.join(names)}."
    )
