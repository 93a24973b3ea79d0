"""Predictions: what a message costs, how long a step takes by a plan, and the plan that exposes the least.

Small buckets leave early, but each pays a latency; large ones pay it seldom, but the last gradients wait for others
and then nothing hides their transfer. The optimum depends on model, machine and network, so `bucket_cap_mb="auto"`
observes some steps and computes it.

| question | file |
|---|---|
| what does a message of n bytes cost here? | `link.py` |
| how long does a step take by a plan, and what does a message cost under a backward? | `step_model.py` |
| which buckets expose the least communication? | `planner.py` |
| when is a gradient ready, on a CPU and on a GPU? | `gradient_clock.py` |
| what is observed, and how do all ranks agree on one plan? | `auto_buckets.py` |
"""

from minddp.forecast.auto_buckets import AutoBuckets, Tuning
from minddp.forecast.gradient_clock import clock_of
from minddp.forecast.link import Link
from minddp.forecast.step_model import Observed

__all__ = ["AutoBuckets", "Link", "Observed", "Tuning", "clock_of"]
