"""What was aimed at before anything was measured, and how a figure compares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import contestants
from benchmarks.contestants import FLOOR, Contestant
from benchmarks.harness import Estimate, Times, compare, fastest

STEP = {"many_small": 0.90, "resnet50": 1.00, "gpt2": 1.00}  # beside torch at its best
STEP_BESIDE_NO_WRAPPER = {"resnet50": 1.02}  # at one rank
PEAK_MEMORY, LAUNCHES = 1.00, 1.00  # beside torch's
PACK = 0.85  # of the rate of a plain copy, at least


def met_by(
    name: str, field: Sequence[Contestant], times: Times, alone: Mapping[str, Any], ranks: int, seed: int
) -> list[dict[str, Any]]:
    """Each aim for the workload `name`. The fastest are chosen in every other round and timed in the rest."""
    torchs = [c.name for c in field if c.name == c.baseline]
    ours = [c.name for c in field if c.baseline is not None and c.name != c.baseline]
    if not (torchs and ours):
        return []  # too many have failed
    choosing = {contestant: seconds[::2] for contestant, seconds in times.items()}
    best_torch, best_ours = fastest(choosing, torchs), fastest(choosing, ours)
    beside = compare(times[best_ours][1::2], times[best_torch][1::2], seed)
    found = [aim(f"step time: {best_ours} beside {best_torch}", beside.median, STEP[name], beside)]
    our_launches, their_launches = (alone[side]["launches"] for side in (best_ours, best_torch))
    found.append(aim(f"launches: {best_ours} beside {best_torch}", ratio(our_launches, their_launches), LAUNCHES))
    with_views = [contestants.candidate("views"), contestants.native("views")]
    if all(side in times for side in with_views):
        our_peak, their_peak = (alone[side]["peak_mib"] for side in with_views)
        found.append(aim("peak memory with views beside torch's", ratio(our_peak, their_peak), PEAK_MEMORY))
    if name in STEP_BESIDE_NO_WRAPPER and ranks == 1 and FLOOR in times:
        bare = compare(times[best_ours][1::2], times[FLOOR][1::2], seed)
        what = f"step time: {best_ours} beside no wrapper"
        found.append(aim(what, bare.median, STEP_BESIDE_NO_WRAPPER[name], bare))
    return found


def aim(what: str, value: float, limit: float, within: Estimate | None = None) -> dict[str, Any]:
    """A figure that was to be at most `limit`."""
    span = {} if within is None else {"low": within.low, "high": within.high}
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit} | span


def ratio(ours: float, theirs: float) -> float:
    """1 where both are nothing."""
    return ours / theirs if theirs else float(ours == theirs) or float("inf")
