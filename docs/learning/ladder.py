"""What each rung of `reference/` computes, sends and waits for, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks import ladder as recorder
from benchmarks.ladder import RungSource
from docs.learning.small_net import CAP_MIB, EXAMPLES_PER_RANK, examples_of, loss_of, small_net
from minddp.core.events import Event, EventKind
from minddp.core.plan import BucketPlan
from minddp.tools.xray import words
from reference.automatic import Automatic
from reference.bucketed import MIB, Bucketed
from reference.flat import Flat
from reference.interface import DataParallel
from reference.naive import Naive
from reference.overlapped import Overlapped

RUNGS: dict[str, Callable[[nn.Module], DataParallel]] = {
    "naive": Naive,
    "flat": Flat,
    "overlapped": Overlapped,
    "bucketed": partial(Bucketed, cap_bytes=int(CAP_MIB * MIB)),
    "automatic": partial(Automatic, cap_bytes=int(CAP_MIB * MIB)),
}
COLUMNS = "{:22}  {:32}  {}"


@dataclass(frozen=True)
class Config(recorder.Config):
    """As `benchmarks.ladder`, with the model of these pages."""

    batch_size: int = EXAMPLES_PER_RANK
    cap_mib: float = CAP_MIB
    warmup_steps: int = 6
    steps: int = 15

    def module(self) -> nn.Module:
        return small_net()


def order(name: str, rank: int) -> str:
    """What rung `name` does in a step: a row for each event, the first one on top."""
    source = RungSource(name, small_net(), RUNGS[name])
    optimizer = torch.optim.SGD(source.rung.parameters(), lr=0.1)
    events: list[Event] = []
    for _ in range(2):  # the first step shows which message carries which gradients
        events.clear()
        source.events.watch(events.append)
        loss_of(source.rung, examples_of(rank)).backward()
        source.rung.synchronize()
        source.events.unwatch(events.append)
        optimizer.step()
        optimizer.zero_grad()
    rows = [("backward computes", "the rank sends", "the rank waits for"), *moments(events, source.plan())]
    return "\n".join(COLUMNS.format(*row).rstrip() for row in rows)


def moments(events: Sequence[Event], plan: BucketPlan) -> list[tuple[str, str, str]]:
    rows = []
    for kind, subject in events:
        if kind is EventKind.PARAM_READY:
            rows.append((plan.params[subject].name, "", ""))
        elif kind is EventKind.BUCKET_LAUNCHED:
            names, nbytes = plan.names(subject), plan.buckets[subject].nbytes
            what = names[0] if len(names) == 1 else f"{len(names)} gradients"
            rows.append(("", f"{subject}: {what}, {words.size(nbytes)}", ""))
        elif kind is EventKind.GRADIENTS_COMPLETE:
            rows.append(("-- backward is over --", "", ""))
        elif kind is EventKind.BUCKET_WAITED:
            rows.append(("", "", f"message {subject}"))
    return rows
