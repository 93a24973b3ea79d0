"""Buckets that fit: from when gradients become ready and what a message costs, the plan that exposes the least.

Small buckets leave early, but each pays a latency; large ones pay it seldom, but the last gradients wait for
company and then nothing hides their journey. Where the best lies depends on model, machine and network, so
`bucket_cap_mb="auto"` watches some steps and computes it.

| question | file |
|---|---|
| what does a message of n bytes cost here? | `link.py` |
| and what under a backward, and what does backward pay for it? | `calibration.py` |
| which buckets expose the least communication? | `planner.py` |
| when is a gradient ready, on a CPU and on a GPU? | `clocks.py` |
| what is observed, and how do all ranks come to one plan? | `auto.py` |
"""

from minddp.forecast.auto_buckets import AutoBuckets, Tuning
from minddp.forecast.calibration import Observed, calibrated, predicted_s
from minddp.forecast.gradient_clock import clock_of
from minddp.forecast.link import Link
from minddp.forecast.planner import Gradient, least_exposed, plan_buckets, simulate

__all__ = [
    "AutoBuckets",
    "Gradient",
    "Link",
    "Observed",
    "Tuning",
    "calibrated",
    "clock_of",
    "least_exposed",
    "plan_buckets",
    "predicted_s",
    "simulate",
]
