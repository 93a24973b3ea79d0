"""What the grader asks of a class, and how it recognises what is wrong. Each check is the body of a rank.

A check wraps a module with the class, runs backward on this rank's shard, ends the synchronisation, and returns a
`Fault` or nothing. Gradients are compared with the oracle's (`comparison.py`).
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import oracle
from .comparison import Fault, compare, first, mean_of, total
from .interface import gradient
from .watched import Event, delays, events, is_well_everywhere


@cache
def load(spec: str) -> Callable[..., Any]:
    """The class that `path/to/file.py:Name` or `package.module:Name` names."""
    place, _, name = spec.rpartition(":")
    names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    if name not in names:
        raise LookupError(f"{place or spec} defines no `{name}`.")
    return names[name]


def synchronize(ddp: Any) -> None:
    for name in ("synchronize", "finish_gradient_synchronization"):
        if hasattr(ddp, name):
            getattr(ddp, name)()
            return


def no_sync(ddp: Any) -> Any:
    return ddp.no_sync() if hasattr(ddp, "no_sync") else nullcontext()


def backward(ddp: Any, *arguments: Any) -> None:
    loss_of(ddp, *arguments).backward()
    synchronize(ddp)


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def tied() -> nn.Module:
    module = nn.Sequential(first := nn.Linear(6, 6), nn.Tanh(), last := nn.Linear(6, 6)).double()
    last.weight = first.weight
    return module


def frozen() -> nn.Module:
    module = plain()
    next(module.parameters()).requires_grad_(False)
    return module


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5).double(), nn.Linear(5, 4), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).float()).tanh().double())


def normed(seed: int) -> nn.Module:
    module = nn.Sequential(plain(seed), nn.BatchNorm1d(3).double())
    dict(module.named_buffers())["1.running_mean"].normal_()
    return module


def wide() -> nn.Module:
    """8 layers of 4 MiB: more than a bucket of 25 MiB."""
    return nn.Sequential(nn.Linear(6, 724), *(nn.Linear(724, 724) for _ in range(8)), nn.Linear(724, 3)).double()


class Branches(nn.Module):
    """Calls the named ones of its layers, in that order; layers are alike, so messages fit each other."""

    def __init__(self, names: str = "abc", width: int = 6) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleDict({name: nn.Linear(width, width).double() for name in names})

    def forward(self, x: Tensor, order: str) -> Tensor:
        x = nn.functional.pad(x, (0, self.width - x.shape[1]))
        for name in order:
            x = torch.tanh(self.layers[name](x))
        return x


def wide_branches() -> nn.Module:
    """Two layers, each of which fills a bucket of 25 MiB."""
    return Branches("ab", width=1820)


def shards_of_ranks(seed: int = 1) -> list[Tensor]:
    """[4, 6] for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randn(dist.get_world_size(), 4, 6, generator=generator, dtype=torch.float64).unbind()]


def loss_of(module: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return module(*arguments).square().mean()


def gradients_of_ranks(module: nn.Module, seed: int = 1) -> list[oracle.Gradients]:
    return [oracle.gradients(module, shard, loss_of) for shard in shards_of_ranks(seed)]


# --- the checks ---


def is_there(rank: int, spec: str) -> Fault | None:
    try:
        load(spec)
    except Exception as error:
        return Fault("unknown", f"{type(error).__name__}: {error}")
    return None


def starts_equal(rank: int, spec: str) -> Fault | None:
    ddp, expected = load(spec)(module := normed(seed=rank)), normed(seed=0)
    trainable, found = dict(expected.named_parameters()), deepcopy(module.state_dict())
    output = ddp(examples := shards_of_ranks()[0])  # on all ranks, since it may send the buffers
    for name, tensor in expected.state_dict().items():
        if not torch.equal(found[name], tensor):
            kind = "start" if name in trainable else "start buffers"
            return Fault(kind, f"`{name}` on rank {rank}: rank 0 has {first(tensor)}, found {first(found[name])}.")
    return None if torch.equal(output, expected(examples)) else Fault("forward", f"On rank {rank}.")


class Case(NamedTuple):
    """What `averages` runs. What is wrong is probably `trap`, unless a gradient was left out."""

    module_of: Callable[[], nn.Module]
    trap: str = ""
    steps: int = 1
    orders: tuple[list[str], list[str]] = ([], [])  # what rank 0 calls `Branches` with, and what the others do


def with_cause(case: Case, step: int, fault: Fault, params: set[int]) -> Fault:
    """`params` are the addresses of the parameters."""
    sent = [tensor.data_ptr() for event in events() for tensor in event.tensors]
    if fault.trap == "local" and (not sent or not params.isdisjoint(sent)):
        fault = fault._replace(trap="parameter" if sent else "silent")
    left_out = fault.trap in ("forgotten", "none") and case.trap != "unused"
    if case.trap and not left_out and (step or case.trap != "later"):
        fault = fault._replace(trap=case.trap)
    return fault._replace(text=f"In step {step + 1}, {fault.text}")


def averages(case: Case, rank: int, spec: str) -> Fault | None:
    """After each of some steps of SGD: does every rank hold the mean?"""
    torch.manual_seed(0)
    ddp = load(spec)(module := case.module_of())
    alone = case.module_of()
    zero = {name: torch.zeros_like(param) for name, param in alone.named_parameters() if param.requires_grad}
    params = {param.data_ptr() for param in module.parameters()}
    for step in range(case.steps):
        calls = [(shard, *case.orders[r > 0]) for r, shard in enumerate(shards_of_ranks(seed=step))]
        alone.load_state_dict(module.state_dict())
        of_rank = [
            zero | oracle.gradients(alone, call, lambda model, args: loss_of(model, *args)) for call in calls
        ]
        module.zero_grad()
        events().clear()
        backward(ddp, *calls[rank])
        fault = compare(module, of_rank)
        if not is_well_everywhere(fault):
            return fault and with_cause(case, step, fault, params)
        for param in module.parameters():
            param.data -= 0.1 * param.grad if param.grad is not None else 0.0
    return None


def waits(rank: int, spec: str) -> Fault | None:
    """Is rank 0 wrong if each message of rank 1 is late, and right if each is complete before rank 0 goes on?"""

    def is_right(before: float, after: float) -> bool:
        ddp, expected = load(spec)(module := plain()), gradients_of_ranks(plain())
        dist.barrier()
        with delays(before * (rank == 1), after * (rank == 0)):
            backward(ddp, shards_of_ranks()[rank])
        return compare(module, expected) is None

    if is_well_everywhere(not is_right(before=0.2, after=0.0) and rank == 0):
        return None
    is_well_everywhere(None)  # A rank that still hangs would take the next messages for its own.
    if is_right(before=0.0, after=0.2) and rank == 0:
        return Fault("unwaited", "Rank 0 is right only if each message is complete at once.")
    return None


def accumulates(rank: int, spec: str) -> Fault | None:
    """Three micro-batches, each but the last under `no_sync` if the class has it."""
    ddp, n = load(spec)(module := plain()), dist.get_world_size()
    batches = [gradients_of_ranks(plain(), seed) for seed in range(3)]
    for seed in (0, 1):
        with no_sync(ddp):
            loss_of(ddp, shards_of_ranks(seed)[rank]).backward()
            if not hasattr(ddp, "no_sync"):
                synchronize(ddp)
    backward(ddp, shards_of_ranks(seed=2)[rank])
    own, means = [of_rank[rank] for of_rank in batches], [mean_of(of_rank) for of_rank in batches]
    mistakes = {
        "incoming": total(own[0], own[1], means[2]),
        "last only": means[2],
        "first lost": total(means[1], means[2]),
        "every sum": {name: n * (n * means[0][name] + means[1][name]) + means[2][name] for name in means[0]},
        "in flight": total(means[0], means[1], own[2]),
    }
    parts = {
        f"rank {number}'s micro-batch {batch}": grads
        for number in range(n)
        for batch, grads in enumerate((of_rank[number] for of_rank in batches), 1)
    }
    return compare(module, [total(*of_batch) for of_batch in zip(*batches, strict=True)], mistakes, parts)


def keeps_buffers(rank: int, spec: str) -> Fault | None:
    ddp = load(spec)(module := normed(seed=0))
    for seed in (1, 2):
        backward(ddp, shards_of_ranks(seed)[rank])
    ddp(shards_of_ranks()[0])  # a broadcast comes before a forward, and this one is the same on all ranks
    mean = dict(module.named_buffers())["1.running_mean"]
    dist.broadcast(of_rank_0 := mean.clone(), src=0)
    return (
        None
        if torch.equal(mean, of_rank_0)
        else Fault("buffers", f"`1.running_mean` on rank {rank} is not rank 0's.")
    )


def kinds_in_a_step(spec: str) -> list[str]:
    """What happens in a third step, in order: `gradient` or `message`."""
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))  # 4 MiB each: more than a bucket of 25 MiB
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: events().append(Event("gradient", [param])))
    ddp = load(spec)(module)
    for _ in range(3):
        module.zero_grad()
        loss = loss_of(ddp, torch.randn(2, 1024))
        events().clear()
        loss.backward()
        synchronize(ddp)
    return [event.kind for event in events()]


def sends_few(rank: int, spec: str) -> Fault | None:
    kinds = kinds_in_a_step(spec)
    messages, gradients = kinds.count("message"), kinds.count("gradient")
    return None if messages < gradients else Fault("messages", f"{messages} messages for {gradients} gradients.")


def overlaps(rank: int, spec: str) -> Fault | None:
    kinds = kinds_in_a_step(spec)
    last_gradient = len(kinds) - kinds[::-1].index("gradient")
    return (
        None
        if "message" in kinds[:last_gradient]
        else Fault("overlap", "The first message leaves after the last gradient.")
    )


def sends_nothing_under_no_sync(rank: int, spec: str) -> Fault | None:
    ddp = load(spec)(plain())
    if not hasattr(ddp, "no_sync"):
        return Fault("no_sync", "The class has no `no_sync()`.")
    events().clear()
    for _ in range(2):
        with no_sync(ddp):
            loss_of(ddp, shards_of_ranks()[0]).backward()
    sent = len(events())
    return Fault("no_sync", f"{sent} messages under `no_sync()`.") if sent else None


def has_torchs_bits(rank: int, spec: str) -> Fault | None:
    shard = shards_of_ranks()[rank].float()
    ours, theirs = plain().float(), plain().float()
    backward(load(spec)(ours), shard)
    backward(DistributedDataParallel(theirs), shard)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not torch.equal(gradient(a), gradient(b)):
            values = f"torch {first(gradient(b))}, found {first(gradient(a))}"
            return Fault("bits", f"`{name}` on rank {rank}: {values}.")
    return None


Check = Callable[[int, str], "Fault | None"]

#: What makes the gradients of a DDP right; then what else it can reach.
REQUIRED: dict[str, Check] = {
    "the class can be loaded": is_there,
    "replicas start equal": starts_equal,
    "it waits for the averages": waits,
    "gradients are averaged": partial(averages, Case(plain)),
    "later steps, too": partial(averages, Case(plain, "later", steps=3)),
    "gradients accumulate": accumulates,
    "tied weights": partial(averages, Case(tied, "tied")),
    "frozen parameters": partial(averages, Case(frozen, "frozen")),
    "two dtypes": partial(averages, Case(TwoDtypes)),
    "several buckets": partial(averages, Case(wide, steps=2)),
    "launch in plan order": partial(averages, Case(Branches, "readiness", orders=(["abc"], ["cba"]))),
    "large layers in plan order": partial(averages, Case(wide_branches, "readiness", orders=(["ab"], ["ba"]))),
}
FURTHER: dict[str, Check] = {
    "no message per parameter": sends_few,
    "overlap with backward": overlaps,
    "no_sync sends nothing": sends_nothing_under_no_sync,
    "buffers stay equal": keeps_buffers,
    "the bits of torch's DDP": has_torchs_bits,
    "unused parameters": partial(averages, Case(Branches, "unused", steps=3, orders=(["ab"], ["abc"]))),
}
#: They take memory, and are asked on one number of ranks.
ONCE = {"several buckets", "large layers in plan order"}
