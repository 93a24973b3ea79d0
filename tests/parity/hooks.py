"""Communication hooks that scripts name: torch's own, and users' of every kind.

Each entry of `HOOKS` makes a fresh `(state, hook)` for one DDP. Annotations are evaluated here: torch refuses
a hook whose annotation of `bucket` is anything but `dist.GradBucket`, a string for instance.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


def _power_sgd() -> tuple[Any, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    return state, powerSGD_hook.powerSGD_hook


def _sum_times_third(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's mean with a scale of its own: the sum over ranks times one third, whatever the world size."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0] * (1 / 3))


def _keep_local(state, bucket):  # type: ignore[no-untyped-def]  # as a user may write it
    """No communication at all, and a result that is not the bucket's buffer."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def _set_buffer(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Puts another tensor in the bucket's place before reducing it."""
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def _take_notes(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's all-reduce hook, and a record of the bucket that the hook got: `verdict.py` compares the notes."""
    grads = tuple((tuple(grad.shape), grad.stride()) for grad in bucket.gradients())
    params = tuple(tuple(param.shape) for param in bucket.parameters())
    state.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), bucket.buffer().dtype, grads, params))
    return default_hooks.allreduce_hook(None, bucket)


HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16_compress": lambda: (None, default_hooks.fp16_compress_hook),
    "fp16_wrapped": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "power_sgd": _power_sgd,
    "sum_times_third": lambda: (None, _sum_times_third),
    "keep_local": lambda: (None, _keep_local),
    "set_buffer": lambda: (None, _set_buffer),
    "take_notes": lambda: ([], _take_notes),
}

#: Those that compute the mean over the ranks, but for rounding in single precision.
MEAN_HOOKS = ("allreduce", "set_buffer", "take_notes")


def factor_of(name: str | None) -> tuple[bool, float]:
    """If gradients stay local with that hook, and the factor by which they or their sums are multiplied."""
    if name == "keep_local":
        return True, 2.0
    return False, 1 / 3 if name == "sum_times_third" else 1 / dist.get_world_size()
