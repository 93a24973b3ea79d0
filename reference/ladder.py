"""All rungs on one model, each measured and compared with the oracle: what `__main__.py` runs."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import oracle
from reference.automatic import Automatic
from reference.bucketed import MIB, Bucketed
from reference.flat import Flat
from reference.interface import DataParallel, gradient
from reference.naive import Naive
from reference.overlapped import Overlapped

Rung = Callable[[nn.Module], DataParallel]

LAYERS, WIDTH, EXAMPLES_PER_RANK = 6, 512, 128
CAP_BYTES = 2 * MIB


@dataclass(frozen=True)
class Measurement:
    """What one rung did. All but `difference` as rank 0 saw it."""

    rung: str
    messages: int  # per step
    nbytes: int  # payload of these messages, per rank
    launched_in_backward: int  # of the messages
    exposed_ms: float  # what a backward with synchronisation takes longer than one without, median
    difference: float  # from the oracle, the largest over all elements and all ranks


def rungs(cap_bytes: int) -> dict[str, Rung]:
    """The ladder from the bottom, with buckets of `cap_bytes`."""
    return {
        "naive": Naive,
        "flat": Flat,
        "overlapped": Overlapped,
        "bucketed": partial(Bucketed, cap_bytes=cap_bytes),
        "automatic": partial(Automatic, cap_bytes=cap_bytes),
    }


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def loss_of(module: nn.Module, examples: Tensor) -> Tensor:
    """Any mean over the examples will do."""
    return (module(examples) - examples).square().mean()


def climb(rank: int, world_size: int, rounds: int, rendezvous: str, results: SimpleQueue) -> None:
    """Body of each rank; rank 0 puts the oracle's largest gradient and the measurements into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(1)
    shards = torch.randn(world_size, EXAMPLES_PER_RANK, WIDTH).unbind()
    # Ranks start from different weights on purpose: the rungs must make them rank 0's.
    expected = oracle.mean_over_ranks(model(seed=0), shards, loss_of)
    measurements = [
        measure(name, rung, model(seed=rank), shards, loss_of, expected, rounds)
        for name, rung in rungs(CAP_BYTES).items()
    ]
    if rank == 0:
        results.put((max(float(grad.abs().max()) for grad in expected.values()), measurements))
    dist.destroy_process_group()


def measure(
    name: str,
    rung: Rung,
    module: nn.Module,
    shards: Sequence[Tensor],
    loss_of: oracle.LossOf,
    expected: oracle.Gradients,
    rounds: int,
) -> Measurement:
    """Wrap a copy of `module`, take one step, compare its gradients with `expected`, then time `rounds` more.

    `shards[rank]` are the examples of each rank. Every rank must call this with the same arguments, except
    that `module` may differ: rank 0's is the one that counts.
    """
    ddp = rung(deepcopy(module))
    loss = partial(loss_of, ddp, shards[ddp.wire.rank])

    loss().backward()
    launched_in_backward = len(ddp.wire.sent)
    ddp.synchronize()
    messages = list(ddp.wire.sent)
    actual = {param_name: gradient(param) for param_name, param in ddp.trainable.items()}
    difference = oracle.largest_difference(actual, expected)

    return Measurement(
        rung=name,
        messages=len(messages),
        nbytes=sum(message.nbytes for message in messages),
        launched_in_backward=launched_in_backward,
        exposed_ms=1e3 * exposed_seconds(ddp, loss, rounds),
        difference=largest_over_ranks(difference),
    )


def exposed_seconds(ddp: DataParallel, loss: Callable[[], Tensor], rounds: int) -> float:
    """Median over `rounds` of: a backward with synchronisation, less one without, right after each other."""
    return statistics.median(
        seconds_of_backward(ddp, loss, synchronize=True) - seconds_of_backward(ddp, loss, synchronize=False)
        for _ in range(rounds)
    )


def seconds_of_backward(ddp: DataParallel, loss: Callable[[], Tensor], synchronize: bool) -> float:
    ddp.zero_grad()
    value = loss()
    dist.barrier()  # or the wait for a rank that is late would count as communication
    start = time.perf_counter()
    with nullcontext() if synchronize else ddp.no_sync():
        value.backward()
    if synchronize:
        ddp.synchronize()
    return time.perf_counter() - start


def largest_over_ranks(value: float) -> float:
    """The largest of all ranks' `value`, NaN if any is."""
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return float(torch.tensor(values, dtype=torch.float64).max())
