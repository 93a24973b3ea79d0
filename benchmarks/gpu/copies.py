"""Bytes moved per second, read and written both: by a plain copy, by the fused pack, and by torch's kernels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import aims
from benchmarks.gpu.device import stopwatch
from benchmarks.harness import estimate
from minddp.fused_pack import FusedPack, fused_pack_of

MIB = 2**20
SIZES_MIB = {"large": (25, 100, 400), "small": (25, 100)}  # of a bucket; one of small gradients is never so large
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
)


def measure(rank: int, part: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Ready for JSON."""
    rows = []
    for size in [1] if options.rehearse else SIZES_MIB["large"]:
        copied = plain_copy(size, options, device)
        rows.append(copied)
        for shape, sizes in SIZES_MIB.items():
            for grad, bucket in DTYPES if options.rehearse or size in sizes else ():
                rows += packing(size, shape, grad, bucket, options, device, copied["gb_per_s"])
    return {"title": "Copies and packing", "ranks": dist.get_world_size(), "rows": rows}


def plain_copy(size: int, options: argparse.Namespace, device: str) -> dict[str, Any]:
    sets = copies_beyond_cache(size, options)
    sources = [torch.randn(size * MIB // 4, device=device) for _ in range(sets)]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    seconds = timed([partial(target.copy_, source) for source, target in pairs], options, device)
    return {"what": "copy", "mib": size, "gb_per_s": 2 * size * MIB / seconds / 1e9}


def packing(
    size: int,
    shape: str,
    grad: torch.dtype,
    bucket: torch.dtype,
    options: argparse.Namespace,
    device: str,
    copy_rate: float,
) -> list[dict[str, Any]]:
    """The fused pack, where it can be had, its inverse, and torch's kernels, into a bucket of `size` MiB."""
    numels = gradient_sizes(shape, size * MIB // bucket.itemsize)
    moved = sum(numels) * (grad.itemsize + bucket.itemsize)
    runs: dict[str, list[Callable[[], object]]] = {"fused pack": [], "fused unpack": [], "torch's kernels": []}
    launches = 0
    for _ in range(copies_beyond_cache(size, options)):
        flat = torch.empty(sum(numels), dtype=bucket, device=device)
        views = list(flat.split(numels))
        grads = [torch.randn(numel, device=device).to(grad) for numel in numels]
        fused = fused_pack_of(views, grad)
        if fused is not None:
            launches = fused.num_launches
            runs["fused pack"].append(partial(gathered, fused, grads))
            runs["fused unpack"].append(partial(fused.scatter, grads))
        runs["torch's kernels"].append(partial(copied_and_scaled, views, grads, flat))
    described = f"{shape}, {str(grad)[6:]} to {str(bucket)[6:]}"
    found = []
    for what, calls in runs.items():
        if calls:
            rate = moved / timed(calls, options, device) / 1e9
            row = {"what": what, "mib": size, "gradients": described, "tensors": len(numels), "gb_per_s": rate}
            row |= {"of_copy": rate / copy_rate} | ({"launches": launches} if what != "torch's kernels" else {})
            if what == "fused pack":
                row |= {"at_least": aims.PACK, "met": rate / copy_rate >= aims.PACK}
            found.append(row)
    return found


def gradient_sizes(shape: str, numel: int) -> list[int]:
    """`large`: a few matrices and their biases, at odd places; `small`: many of 16 KiB and less."""
    pattern = [1_048_576, 1024, 2_359_296, 1000] if shape == "large" else [4096, 64, 1024, 10]
    sizes: list[int] = []
    left = numel
    while left:
        sizes.append(min(pattern[len(sizes) % 4], left))
        left -= sizes[-1]
    return sizes if len(sizes) > 1 else [numel // 2, numel - numel // 2]


def gathered(fused: FusedPack, grads: Sequence[Tensor]) -> None:
    assert fused.gather(grads, 1 / 3)


def copied_and_scaled(views: list[Tensor], grads: list[Tensor], flat: Tensor) -> None:
    torch._foreach_copy_(views, grads)
    flat.mul_(1 / 3)


def copies_beyond_cache(size: int, options: argparse.Namespace) -> int:
    """How many sets of buffers to go through in turn, so that none is still in the second-level cache."""
    return 1 if options.rehearse else max(2, 400 // size)


def timed(calls: Sequence[Callable[[], object]], options: argparse.Namespace, device: str) -> float:
    """Seconds of one call: the median over rounds, each of which makes every call."""
    took = []
    for number in range(options.warmup_rounds + options.rounds):
        with stopwatch(device) as seconds:
            for call in calls:
                call()
        if number >= options.warmup_rounds:
            took.append(seconds[0] / len(calls))
    return estimate(np.array(took), options.seed).median
