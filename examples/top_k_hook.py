"""A communication hook with a state: sends only the largest elements, and the others later (error feedback).

    ddp.register_comm_hook(TopK(fraction=0.01), top_k)

Each rank sends the `fraction` of a bucket's elements that are largest in magnitude. What it leaves out is added to
its gradient of the next step (Stich et al., "Sparsified SGD with Memory", 2018, algorithm 1). Torch's class takes
the hook, too, and computes the same bits. All ranks add in the same order, so replicas stay equal. The average is
another one than without a hook; with `fraction` 1 it is the mean.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class TopK:
    """`left_out` is what of each parameter's gradient has not been sent yet. By parameter: buckets are rebuilt."""

    fraction: float
    group: dist.ProcessGroup | None = None
    left_out: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)


def top_k(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    world_size = dist.get_world_size(state.group)
    flat = bucket.buffer()
    owned = list(zip(bucket.parameters(), bucket.gradients(), strict=True))  # gradients are views of `flat`
    for param, gradient in owned:
        if param in state.left_out:
            gradient += state.left_out[param]
    places = flat.abs().topk(max(1, int(state.fraction * flat.numel()))).indices
    values = flat[places] / world_size
    flat[places] = 0
    for param, gradient in owned:
        state.left_out[param] = gradient.clone()

    places_of = [torch.empty_like(places) for _ in range(world_size)]
    values_of = [torch.empty_like(values) for _ in range(world_size)]
    gathered = [
        dist.all_gather(places_of, places, group=state.group, async_op=True).get_future(),
        dist.all_gather(values_of, values, group=state.group, async_op=True).get_future(),
    ]

    def average(_: object) -> torch.Tensor:
        flat.zero_()
        for where, what in zip(places_of, values_of, strict=True):
            flat.index_add_(0, where, what)
        return flat

    return torch.futures.collect_all(gathered).then(average)
