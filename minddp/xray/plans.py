"""Other plans to compare the recorded one with: the common settings, and one computed for this step. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.forecast.link import Link
from minddp.forecast.planner import plan_buckets
from minddp.options import MIB, BucketCaps
from minddp.xray.predict import Prediction, simulate
from minddp.xray.recording import Layout
from minddp.xray.timeline import Step


@dataclass(frozen=True)
class Alternative:
    """A plan, in words, the arguments of `DistributedDataParallel` that make it, and what it would do."""

    title: str
    arguments: dict[str, Any]
    prediction: Prediction

    @property
    def is_computed(self) -> bool:
        return self.arguments.get("bucket_cap_mb") == "auto"

    @property
    def code(self) -> str:
        """The arguments as they are written."""
        return ", ".join(f"{name}={json.dumps(value)}" for name, value in self.arguments.items())


def alternatives(step: Step, link: Link) -> list[Alternative]:
    """The recorded plan, then settings from few buckets to many, then a computed plan; each partition once."""
    recorded = Alternative("as recorded", {}, simulate(step, step.layout, link))
    others = {_partition(step.layout): recorded}
    for title, arguments, plan in [*_settings(step), _computed(step, link)]:
        layout = Layout.of(plan)
        if _partition(layout) not in others:
            others[_partition(layout)] = Alternative(title, arguments, simulate(step, layout, link))
    recorded, *rest = others.values()
    return [recorded, *sorted(rest, key=lambda plan: (plan.is_computed, len(plan.prediction.layout.buckets)))]


def _settings(step: Step) -> Iterator[tuple[str, dict[str, Any], BucketPlan]]:
    """Settings that people use, from one bucket to one per parameter."""
    specs, order = step.layout.specs(), ready_order(step)
    total_mib = step.layout.nbytes / MIB
    largest = math.floor(math.log2(max(total_mib, 2**-8) / 1.5))
    halves = [2.0**exponent for exponent in range(largest, largest - 5, -1)]
    settings: list[tuple[str, float | None]] = [
        ("one bucket", math.ceil(total_mib)),
        ("a bucket per parameter", 0),
        ("default: 1 MiB, then 25 MiB", None),
        *((f"buckets of {_mib(cap)}", int(cap) if cap >= 1 else cap) for cap in halves),
    ]
    for title, cap_mb in settings:
        caps_bytes = BucketCaps.from_mib(cap_mb, None).after_rebuild()
        arguments = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
        yield title, arguments, plan_from_readiness(specs, order, caps_bytes)


def _computed(step: Step, link: Link) -> tuple[str, dict[str, Any], BucketPlan]:
    """What `bucket_cap_mb="auto"` makes of these times: of each gradient, that of the rank that has it last."""
    ready_s = [0.0] * len(step.layout.params)
    for rank in step.ranks:
        for param, t_ns in rank.ready_ns.items():
            ready_s[param] = max(ready_s[param], (t_ns - step.begin_ns) / 1e9)
    return "computed for this step", {"bucket_cap_mb": "auto"}, plan_buckets(step.layout.specs(), ready_s, link)


def ready_order(step: Step) -> list[int]:
    """The order in which gradients arrived on the first rank; those that did not, last."""
    ready_ns = step.ranks[0].ready_ns
    return sorted(range(len(step.layout.params)), key=lambda param: ready_ns.get(param, math.inf))


def _mib(value: float) -> str:
    return f"{value:g} MiB" if value >= 1 else f"{value * 1024:g} KiB"


def _partition(layout: Layout) -> Sequence[frozenset[int]]:
    return tuple(frozenset(bucket.params) for bucket in layout.buckets)
