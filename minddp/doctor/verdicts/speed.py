"""Is it fast enough, and are all ranks equally fast? Clocks, stragglers, collectives, a step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from minddp.doctor.board import Outcome, to_blame
from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, count, name_ranks
from minddp.doctor.fit import Offset, Reading, clock_offset, fit_line
from minddp.doctor.verdicts import load

Outcomes = Mapping[int, Outcome]

CLOCKS_APART_S = 1.0
SLOW_BYTES_PER_S = 100e6  # about a gigabit a second
LATE_S = 5e-3
EXAMPLE_PARAMETERS = 25_000_000
STRAGGLES = 1.25
MOSTLY_WAITING = 3.0
EXCHANGE_LESS = (
    "See that the hosts' fastest network is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME). Exchange less: "
    "accumulate under no_sync(), or compress with torch's bf16_compress_hook."
)
COMPUTE_MORE = (
    "The ranks mostly wait for the network, though a model with more arithmetic for each parameter waits less. "
    "Give each rank a larger batch, or accumulate under no_sync()."
)


def judge_failure(check: str, outcomes: Outcomes, facts: Mapping[int, RankFacts]) -> Finding:
    """A measurement that broke off."""
    blamed = to_blame(outcomes)
    rank, outcome = next(iter(blamed.items()))
    ranks, host = name_ranks(list(blamed)).capitalize(), facts[rank].machine.name
    if outcome.ended == "silent":
        return Finding(
            check,
            Verdict.BROKEN,
            f"{ranks} (pid {facts[rank].pid} on {host}) fell silent in the middle of it: it has ended, or hangs.",
            "See what it printed, and whether the kernel killed it for want of memory (dmesg).",
        )
    lost = outcome.ended == "out of time" or "timed out" in outcome.error.lower()
    return Finding(
        check,
        Verdict.BROKEN,
        f"{ranks} on {host}: {outcome.error}.",
        "Connections can be opened, but what is sent gets lost, or is very slow. If small messages pass and large "
        "ones hang, compare the MTU of the interfaces on all hosts (`ip link`)."
        if lost
        else "The ranks are connected, so look for the cause on that host.",
    )


# ---------------------------------------------------------------------- clocks


def judge_clocks(facts: Mapping[int, RankFacts], readings: Mapping[int, Sequence[Reading]]) -> Finding:
    """Whether hosts agree on the time, as far as can be told."""
    offsets = clock_offsets(facts, readings)
    if not offsets:
        return Finding("clocks", Verdict.FINE, "All ranks read the same clock.")
    worst = max(offsets, key=lambda host: abs(offsets[host].seconds))
    apart, error_s = offsets[worst]
    first = facts[0].machine.name
    if abs(apart) - error_s <= CLOCKS_APART_S:
        within = max(abs(offset.seconds) + offset.error_s for offset in offsets.values())
        return Finding("clocks", Verdict.FINE, f"The hosts' clocks agree within {within:.2g} s.")
    return Finding(
        "clocks",
        Verdict.NOTE,
        f"The clock of {worst} is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} that of {first}.",
        "Logs and files of the hosts will not be in order; have them set by NTP (timedatectl, chronyc tracking).",
    )


def clock_offsets(facts: Mapping[int, RankFacts], readings: Mapping[int, Sequence[Reading]]) -> dict[str, Offset]:
    """By host, how far its clock is ahead of rank 0's; without those that read rank 0's."""
    offsets: dict[str, Offset] = {}
    for rank, told in facts.items():
        if told.machine.identity != facts[0].machine.identity:
            offsets.setdefault(told.machine.name, clock_offset(readings[rank], readings[0]))
    return offsets


# ---------------------------------------------------------------------- stragglers


def judge_stragglers(facts: Mapping[int, RankFacts], seconds: Mapping[int, float]) -> list[Finding]:
    """Whether a rank needs much longer than most for the same arithmetic."""
    usual_s = statistics.median_low(seconds.values())
    found = [
        Finding(
            "stragglers",
            Verdict.NOTE,
            f"Rank {rank} on {facts[rank].machine.name} takes {took_s * 1e3:.1f} ms for what takes others "
            f"{usual_s * 1e3:.1f} ms, {took_s / usual_s:.2f} times as long. {_load(facts[rank])}",
            "Every step waits for it. See what else runs there (top, nvidia-smi), whether it is throttled, and "
            "whether its ranks have cores of their own.",
        )
        for rank, took_s in seconds.items()
        if took_s > STRAGGLES * usual_s
    ]
    if found:
        return found
    spread = max(seconds.values()) / usual_s
    return [
        Finding(
            "stragglers",
            Verdict.FINE,
            f"The same arithmetic takes {usual_s * 1e3:.1f} ms on {count(len(seconds), 'rank')}, at most "
            f"{spread:.2f} times as long.",
        )
    ]


def _load(told: RankFacts) -> str:
    return f"On its {count(told.machine.cores, 'core')} {told.machine.load:.1f} processes wanted to run lately."


# ---------------------------------------------------------------------- collectives

Curve = Mapping[int, float]


def slowest(curves: Sequence[Sequence[Sequence[float]]]) -> dict[int, float]:
    """Seconds by bytes, of the slowest rank for each size. Each rank's curve is a list of pairs."""
    return {int(points[0][0]): max(seconds for _, seconds in points) for points in zip(*curves, strict=True)}


def judge_curves(curves: Mapping[str, Curve], obstacle: str, *, is_busy: bool) -> list[Finding]:
    """`curves` by name, such as "all-reduce, gloo"; `obstacle` is why the ranks of one host do not share memory.

    Where a machine `is_busy`, the network is not suspected: messages are carried by threads that need cores.
    """
    found = [
        Finding(
            "collectives",
            Verdict.NOTE,
            f"{name} is slow: {describe(curve)}.",
            load.REMEDY if is_busy else EXCHANGE_LESS,
        )
        for name, curve in curves.items()
        if _is_slow(curve)
    ]
    found.append(Finding("collectives", Verdict.FINE, _example(curves)))
    if obstacle:
        found.append(
            Finding(
                "collectives",
                Verdict.NOTE,
                f"The ranks of this host do not share memory: {obstacle}.",
                "Nothing is wrong with that: gradients travel by the process group.",
            )
        )
    return found


def _is_slow(curve: Curve) -> bool:
    if len(curve) == 1:
        return True  # the smallest message took so long that no larger one was tried
    line = fit_line(curve)
    return line.bytes_per_s < SLOW_BYTES_PER_S or line.latency_s > LATE_S


def _example(curves: Mapping[str, Curve]) -> str:
    """What it means for a model, whose gradients travel in buckets as large as the largest message, or larger."""
    times = []
    for name, curve in curves.items():
        operation, _, carrier = name.partition(", ")
        if operation == "all-reduce":
            took_s = curve[max(curve)] * 4 * EXAMPLE_PARAMETERS / max(curve)
            times.append(f"{took_s * 1e3:.0f} ms by {carrier}")
    return f"To average {EXAMPLE_PARAMETERS // 10**6} million float32 gradients takes {', '.join(times)}."


def describe(curve: Curve) -> str:
    """`0.12 ms + 1.10 GB/s`."""
    if len(curve) == 1:
        ((nbytes, seconds),) = curve.items()
        return f"{seconds:.2f} s for {nbytes:,} bytes"
    line = fit_line(curve)
    return f"{line.latency_s * 1e3:.2f} ms + {line.bytes_per_s / 1e9:.2f} GB/s"


# ---------------------------------------------------------------------- a step


def judge_step(steps: Mapping[int, Mapping[str, float]], *, is_busy: bool) -> Finding:
    """What synchronisation adds to a step, on the rank that waits longest."""
    together_s = max(step["together"] for step in steps.values())
    alone_s = max(step["alone"] for step in steps.values())
    ratio = together_s / alone_s
    fact = (
        f"Forward and backward of a model with {steps[0]['parameters'] / 1e6:.1f} million parameters take "
        f"{alone_s * 1e3:.1f} ms alone and {together_s * 1e3:.1f} ms synchronised: {ratio:.2f} times as long."
    )
    if len(steps) == 1 or ratio < MOSTLY_WAITING:
        return Finding("step", Verdict.FINE, fact)
    return Finding(
        "step",
        Verdict.NOTE,
        fact,
        load.REMEDY if is_busy else COMPUTE_MORE,
    )
