"""Other plans to compare the recorded one with: the common settings, and one computed for this step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minddp.options import MIB, BucketCaps
from minddp.plan import plan_from_readiness
from minddp.xray.predict import CostModel, Prediction, simulate
from minddp.xray.recording import Layout
from minddp.xray.timeline import Step

MOST_GROUPS = 128  # neighbouring parameters are put together beyond that, and stay together
MOST_BUCKETS = 24
ENOUGH = 0.005  # of the step: a plan that is so close to the best, with fewer buckets, is as good


@dataclass(frozen=True)
class Alternative:
    """A plan, in words, the arguments of `DistributedDataParallel` that make it, and what it would do."""

    title: str
    arguments: dict[str, Any]
    prediction: Prediction

    @property
    def code(self) -> str:
        """The arguments as they are written."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())


def alternatives(step: Step, cost: CostModel) -> list[Alternative]:
    """The recorded plan first, then others, each partition of the parameters once."""
    order = ready_order(step)
    found = [Alternative("as recorded", {}, simulate(step, step.layout, cost))]
    seen = {_partition(step.layout)}
    for title, arguments in [*_settings(step.layout.nbytes), *_computed(step, order, cost)]:
        layout = relaid(step.layout, order, arguments)
        if _partition(layout) not in seen:
            seen.add(_partition(layout))
            found.append(Alternative(title, arguments, simulate(step, layout, cost)))
    return found


def ready_order(step: Step) -> list[int]:
    """The order in which gradients arrived on the first rank; those that did not, last."""
    ready_ns = step.ranks[0].ready_ns
    return sorted(range(len(step.layout.params)), key=lambda param: ready_ns.get(param, math.inf))


def relaid(layout: Layout, order: Sequence[int], arguments: dict[str, Any]) -> Layout:
    """The parameters of `layout` in the buckets that these arguments would make of them."""
    caps = BucketCaps.from_mib(
        arguments.get("bucket_cap_mb"),
        arguments.get("bucket_cap_mb_list"),
        arguments.get("first_bucket_cap_mb"),
    )
    return Layout.of(plan_from_readiness(layout.specs(), order, caps.after_rebuild()))


def _settings(nbytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that people use, from one bucket to one per parameter."""
    total_mib = nbytes / MIB
    yield "one bucket", {"bucket_cap_mb": math.ceil(total_mib)}
    yield "default: 1 MiB, then 25 MiB", {}
    exponent = math.floor(math.log2(max(total_mib, 2**-8) / 1.5))
    for cap_mib in (2.0**power for power in range(exponent, exponent - 5, -1)):
        yield f"buckets of {_mib(cap_mib)}", {"bucket_cap_mb": int(cap_mib) if cap_mib >= 1 else cap_mib}
    yield "a bucket per parameter", {"bucket_cap_mb": 0}


def _mib(value: float) -> str:
    return f"{value:g} MiB" if value >= 1 else f"{value * 1024:g} KiB"


def _computed(step: Step, order: Sequence[int], cost: CostModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """The best partition of the ready order by the model; none where gradients differ in dtype."""
    if len({param.dtype for param in step.layout.params}) > 1:
        return
    sizes_mib = [nbytes / MIB for nbytes in best_sizes(step, order, cost)]
    yield "computed for this step", {"bucket_cap_mb_list": sizes_mib}


def best_sizes(step: Step, order: Sequence[int], cost: CostModel) -> list[int]:
    """Sizes of consecutive buckets of the ready order, so that the last one lands early; few, if that is as good.

    With f[k][j] the moment at which the first j gradients have landed, in k buckets at most:
    f[k][j] = min over i < j of max(f[k-1][i], ready[j]) + cost(bytes i..j).
    """
    groups = _groups(step, order)
    ready_s = np.maximum.accumulate([ready for _, ready in groups])
    total = np.concatenate([[0], np.cumsum([nbytes for nbytes, _ in groups])])
    count = len(groups)
    landed = np.full((MOST_BUCKETS + 1, count + 1), np.inf)
    landed[:, 0] = -np.inf
    cut = np.zeros((MOST_BUCKETS + 1, count + 1), dtype=int)
    for k in range(1, MOST_BUCKETS + 1):
        for j in range(1, count + 1):
            seconds = cost.latency_s + (total[j] - total[:j]) / cost.bytes_per_s
            ends = np.maximum(landed[k - 1, :j], ready_s[j - 1]) + seconds
            cut[k, j] = int(np.argmin(ends))
            landed[k, j] = ends[cut[k, j]]
    best = landed[1:, count].min()
    k = 1 + int(np.argmax(landed[1:, count] <= best + ENOUGH * step.length_ns / 1e9))
    bounds, j = [count], count
    while j > 0:
        j, k = int(cut[k, j]), k - 1
        bounds.append(j)
    bounds.reverse()
    return [int(total[right] - total[left]) for left, right in zip(bounds, bounds[1:], strict=False)]


def _groups(step: Step, order: Sequence[int]) -> list[tuple[int, float]]:
    """Neighbours in the ready order as (bytes, seconds at which all ranks have them), at most `MOST_GROUPS`."""
    per_group = math.ceil(len(order) / MOST_GROUPS)
    groups = []
    for start in range(0, len(order), per_group):
        members = order[start : start + per_group]
        times = [rank.ready_ns[param] for rank in step.ranks for param in members if param in rank.ready_ns]
        ready_s = (max(times, default=step.begin_ns) - step.begin_ns) / 1e9
        groups.append((sum(step.layout.params[param].nbytes for param in members), ready_s))
    return groups


def _partition(layout: Layout) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(bucket.params) for bucket in layout.buckets)
