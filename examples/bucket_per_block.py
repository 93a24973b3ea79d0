"""A bucket policy: one bucket for each block of the model, such as a layer of a transformer.

    ddp.follow(one_bucket_per_block(ddp.plan, depth=2))  # on every rank: "layers.0", "layers.1", ...

A plan is a pure function of names and sizes; see `core/plan.py`. The last block leaves first, since backward
computes its gradients first. On two ranks the bits are torch's. From three on, gloo adds the ranks in an order
that depends on an element's place in its bucket, so another plan rounds otherwise; with transport="shared_memory",
too.
"""

from __future__ import annotations

from minddp import BucketPlan
from minddp.core.plan import plan_from_groups


def one_bucket_per_block(plan: BucketPlan, depth: int = 1) -> BucketPlan:
    """A block is the first `depth` parts of a parameter's name. A bucket has one dtype and one device."""
    blocks: dict[object, list[int]] = {}
    for index, spec in enumerate(plan.params):
        block = tuple(spec.name.split(".")[:depth])
        alone = index if spec.sparse else None
        blocks.setdefault((block, spec.dtype, spec.device, alone), []).append(index)
    return plan_from_groups(plan.params, list(reversed(blocks.values())), origin=f"block, depth {depth}")
