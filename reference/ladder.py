"""All rungs side by side: what a rank sends in a step, and what it holds, counted while they run.

    python -m reference --ranks 4

Every rung trains the same layers. A step of SGD with a learning rate of 1 subtracts the gradient itself, so the
weights after it show whether that is the oracle's. What exists is counted in the second of two steps of Adam: when
the optimizer begins, and whenever a gradient is complete (the largest of these is the peak).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from . import oracle
from .automatic import Automatic
from .bucketed import MIB, Bucketed
from .checks import load
from .data_parallel import DataParallelInOneProcess
from .flat import Flat
from .grade import fault_of
from .interface import DataParallel
from .naive import Naive
from .overlapped import Overlapped
from .ranks import RankFailure, Ranks
from .sharding import Held, OptimizerOf, Training, held
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

Rung = Callable[[nn.Module], DataParallel]

LAYERS, WIDTH, EXAMPLES_PER_RANK = 6, 512, 128
CAP_BYTES = MIB  # of a bucket: a layer
SGD, ADAM = partial(torch.optim.SGD, lr=1.0), partial(torch.optim.Adam, lr=1e-3)
TOLERANCE = 1e-6  # rounding of weights that are near 1; the largest element of the gradient is about 2e-2


def rungs(cap_bytes: int) -> dict[str, Rung]:
    """DDP's ladder from the bottom, with buckets of `cap_bytes`."""
    return {
        "naive": Naive,
        "flat": Flat,
        "overlapped": Overlapped,
        "bucketed": partial(Bucketed, cap_bytes=cap_bytes),
        "automatic": partial(Automatic, cap_bytes=cap_bytes),
    }


class Replicated:
    """A rung of DDP's ladder as a `Training`: each rank has the whole optimizer."""

    def __init__(self, module: nn.Module, optimizer_of: OptimizerOf, *, rung: Rung):
        self.module, self.ddp = module, rung(module)
        self.wire = self.ddp.wire
        self.optimizer = optimizer_of([*self.ddp.trainable.values()])

    def __call__(self, x: Tensor) -> Tensor:
        return self.ddp(x)

    def step(self) -> None:
        self.ddp.synchronize()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return self.ddp.weights()


#: All rungs as trainings: called with a module and an `OptimizerOf`.
RUNGS: dict[str, Callable[..., Training]] = {
    "data_parallel": DataParallelInOneProcess,
    **{name: partial(Replicated, rung=rung) for name, rung in rungs(CAP_BYTES).items()},
    "zero1": partial(Zero1, cap_bytes=CAP_BYTES),
    "zero2": partial(Zero2, cap_bytes=CAP_BYTES),
    "zero3": Zero3,
}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def shards_of(ranks: int) -> list[Tensor]:
    """The same in every process: [EXAMPLES_PER_RANK, WIDTH] for each rank."""
    generator = torch.Generator().manual_seed(1)
    return [*torch.randn(ranks, EXAMPLES_PER_RANK, WIDTH, generator=generator).unbind()]


def loss_of(module: Callable[[Tensor], Tensor], examples: Tensor) -> Tensor:
    """Any mean over the examples will do."""
    return (module(examples) - examples).square().mean()


@dataclass(frozen=True)
class Count:
    """One rung on one rank, in its second step of Adam; all sizes in bytes."""

    rung: str
    messages: int
    in_backward: int  # of the messages
    sent: int
    held: Held  # when the optimizer begins
    peak: int
    difference: float  # of this rank's weights from the oracle's, after a step of SGD

    @property
    def is_equal(self) -> bool:
        """To the oracle, but for rounding; a NaN is not."""
        return self.difference <= TOLERANCE


def count(rung: str, make: Callable[..., Training]) -> Count | None:
    """A rung that needs one process is counted on rank 0, with as many replicas as there are ranks."""
    rank, shards = dist.get_rank(), shards_of(dist.get_world_size())
    expected = oracle.mean_over_ranks(model(seed=0), shards, loss_of)
    examples = shards[rank]
    if "devices" in inspect.signature(make).parameters:
        if rank != 0:
            return None
        make, examples = partial(make, devices=["cpu"] * len(shards)), torch.cat(shards)

    # Ranks start from different weights on purpose: a rung must make them rank 0's.
    training = make(model(seed=rank), SGD)
    loss_of(training, examples).backward()
    training.step()
    stepped = {name: param.detach() - expected[name] for name, param in model(seed=0).named_parameters()}
    difference = oracle.largest_difference(training.weights(), stepped)

    module, seen = model(seed=0), list[Held]()

    def look(*_: object) -> None:
        seen.append(held(training.module, training.optimizer))

    for param in module.parameters():
        param.register_post_accumulate_grad_hook(look)  # before a rung's own hook, which may send the gradient
    training = make(module, ADAM)
    training.optimizer.register_step_pre_hook(look)
    for _ in range(2):
        seen.clear()
        before = len(training.wire.sent)
        loss = loss_of(training, examples)
        after_forward = len(training.wire.sent)
        loss.backward()
        in_backward = len(training.wire.sent) - after_forward
        training.step()
    sent = [message.sent_nbytes for message in training.wire.sent[before:]]
    return Count(rung, len(sent), in_backward, sum(sent), seen[-1], max(map(sum, seen)), difference)


def count_all(_rank: int, yours: str | None = None) -> list[Count]:
    """Body of each rank: every rung, and a training of the reader's by its `FILE:CLASS`."""
    makers = RUNGS | ({"yours": load(yours)} if yours else {})
    return [counted for name, make in makers.items() if (counted := count(name, make))]


def table_of(counts: list[Count]) -> Table:
    """A row for each rung, sizes in MiB."""
    headings = ("messages", "in backward", "sent", "parameters", "gradients", "optimizer", "sum", "peak", "equal")
    table = Table("rung", *(Column(heading, justify="right") for heading in headings), box=None)
    for c in counts:
        sizes = (f"{nbytes / MIB:.2f}" for nbytes in (c.sent, *c.held, sum(c.held), c.peak))
        table.add_row(c.rung, str(c.messages), str(c.in_backward), *sizes, "yes" if c.is_equal else "NO")
    return table


def main(ranks: int = 2, yours: str | None = None) -> None:
    """Run every rung on the same model, count what it sends and holds, and compare it with the oracle.

    Args:
        ranks: how many processes; for data_parallel, how many replicas.
        yours: `mine.py:MyZero`, a class as `Zero1` is, to be counted beside the rungs.
    """
    if ranks < 2:
        raise SystemExit(f"--ranks is {ranks}. Choose 2 or more: one rank has nothing to share.")
    with Ranks(ranks) as pool:
        try:
            of_rank = pool.run(count_all, yours)
        except RankFailure as failure:
            raise SystemExit(fault_of(failure).text) from None
    console = Console(width=110)
    console.print(f"MiB on rank 0 of {ranks} (data_parallel: device 0 of {ranks}), Adam, in the second step")
    console.print(table_of(of_rank[0]))
    console.print("sent: by this rank, if a ring carries it. sum: what exists when the optimizer begins.")
    console.print("peak: the largest sum at the arrival of a gradient, or then. equal: to the oracle.")
    if wrong := {c.rung: f"{c.difference:.1e}" for counts in of_rank for c in counts if not c.is_equal}:
        raise SystemExit(f"Not the oracle's gradient: {wrong}.")
