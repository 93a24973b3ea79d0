"""What goes wrong if one mechanism is left out: in most cases no error, only other numbers.

Most lessons use a module of a few weights whose gradients are given, so that each result shows which gradients it
contains.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from docs.learning.small_net import CAP_MIB, examples_of, loss_of, small_net
from minddp import DistributedDataParallel
from reference import oracle
from reference.bucketed import MIB, Bucketed
from reference.interface import DataParallel, gradient
from reference.overlapped import Overlapped


class Given(nn.Module):
    """Weights that are single numbers. Called with their gradients; returns a loss that has them."""

    def __init__(self, *names: str):
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in names})

    def forward(self, gradients: Mapping[str, float]) -> Tensor:
        terms = [self.weights[name] * value for name, value in gradients.items()]
        return torch.stack(terms).sum()


def grads(module: nn.Module) -> str:
    """All gradients of a `Given`, in a few words."""
    named = ((name.rpartition(".")[2], param) for name, param in module.named_parameters())
    return ", ".join(f"{name} {gradient(param).item():g}" for name, param in named)


def on_every_rank(text: str) -> str:
    """The text of every rank, a line each."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


# ------------------------------------------------------------------ the wrong tensor


class AveragesTheParameter(Overlapped):
    """Mistakes the hook's argument for the gradient."""

    def on_grad_accumulated(self, name: str, param: nn.Parameter) -> None:
        self.in_flight[name] = self.wire.average(param, label=name)  # it should be `param.grad`


def parameter(rank: int) -> str:
    """The hook's argument, the parameter, is averaged."""
    wrong = trained(AveragesTheParameter(small_net()), rank, steps=5)
    right = trained(Overlapped(small_net()), rank, steps=5)
    return f"averaging `param`\n{wrong}\n\naveraging `param.grad`\n{right}"


def trained(ddp: DataParallel, rank: int, steps: int) -> str:
    """The loss on this rank step by step, and a check of gradients and replicas."""
    shards = [examples_of(rank) for rank in range(dist.get_world_size())]
    expected = oracle.mean_over_ranks(ddp.module, shards, loss_of)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    losses, difference = [], None
    for _ in range(steps):
        loss = loss_of(ddp, shards[rank])
        loss.backward()
        ddp.synchronize()
        if difference is None:
            actual = {name: gradient(param) for name, param in ddp.trainable.items()}
            difference = oracle.largest_difference(actual, expected)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return "\n".join(
        [
            f"  loss on rank 0           {' '.join(f'{loss:.2f}' for loss in losses)}",
            f"  is it the mean gradient? {'yes, to the bit' if difference == 0 else 'no'}",
            f"  are the replicas equal?  {'yes, to the bit' if replicas_are_equal(ddp) else 'no'}",
        ]
    )


def replicas_are_equal(module: nn.Module) -> bool:
    weights = torch.cat([param.detach().reshape(-1) for param in module.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    return all(torch.equal(other, weights) for other in everywhere)


class AveragesTheIncoming(DataParallel):
    """Averages what one backward adds to `.grad`, before it is added."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        for name, param in self.trainable.items():
            param.register_hook(partial(self.on_incoming_gradient, name))

    def on_incoming_gradient(self, name: str, grad: Tensor) -> Tensor:
        if self.synchronizing:
            grad = grad.clone()
            self.wire.average(grad, label=name).wait()
        return grad

    def synchronize(self) -> None:
        """Nothing is in flight."""


def incoming(rank: int) -> str:
    """The gradient is averaged on its way to `.grad`, and earlier micro-batches are left out."""
    return (
        f"averaging what arrives\n{accumulated(AveragesTheIncoming, rank)}\n\n"
        f"averaging what `.grad` has become\n{accumulated(Overlapped, rank)}"
    )


def accumulated(rung: type[DataParallel], rank: int) -> str:
    """Two micro-batches on each of two ranks, with the gradients 1, 10, 100 and 1000: their mean is 1111 / 2."""
    ddp = rung(Given("w"))
    with ddp.no_sync():
        ddp({"w": 1.0 if rank == 0 else 100.0}).backward()
    ddp({"w": 10.0 if rank == 0 else 1000.0}).backward()
    ddp.synchronize()
    return on_every_rank(grads(ddp.module))


# ------------------------------------------------------------------ the wrong moment


def readiness(rank: int) -> str:
    """Each rank launches gradients as they become ready, and the ranks differ in that order."""
    return (
        f"launched when ready (overlapped)\n{two_branches(Overlapped, rank)}\n\n"
        f"launched in plan order (bucketed)\n{two_branches(partial(Bucketed, cap_bytes=0), rank)}"
    )


def two_branches(rung: Callable[[nn.Module], DataParallel], rank: int) -> str:
    """Gradients 1 and 3 of `left`, 10 and 30 of `right`; rank 1 computes its branches in the other order."""
    ddp = rung(Given("left", "right"))
    ddp({"left": 1.0, "right": 10.0} if rank == 0 else {"right": 30.0, "left": 3.0}).backward()
    ddp.synchronize()
    return on_every_rank(grads(ddp.module))


def unwaited(rank: int) -> str:
    """`.grad` is read before the all-reduce is complete."""
    ddp = Overlapped(Given("w"))
    store = dist.distributed_c10d._get_default_store()
    has_looked = f"docs/has looked/{store.add(f'docs/looks of rank {rank}', 1)}"
    if rank == 1:
        store.wait([has_looked])  # rank 1 is late: its backward begins when rank 0 has looked
    ddp({"w": 1.0 if rank == 0 else 3.0}).backward()
    early = grads(ddp.module)
    if rank == 0:
        store.set(has_looked, "")
    ddp.synchronize()
    return f"rank 0 before the wait: {early}\nrank 0 after the wait:  {grads(ddp.module)}"


# ------------------------------------------------------------------ something left out


def start(rank: int) -> str:
    """Every rank begins with weights of its own."""
    lines = []
    for init_sync in (False, True):
        module = Given("w")
        module.weights["w"].data.fill_(5.0 + rank)
        ddp = DistributedDataParallel(module, init_sync=init_sync)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        weights = [module.weights["w"].item()]
        for _ in range(3):
            ddp({"w": 1.0 if rank == 0 else 3.0}).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(module.weights["w"].item())
        steps = " ".join(f"{weight:g}" for weight in weights)
        lines += [f"init_sync={init_sync}: the weight at each step", on_every_rank(steps), ""]
    return "\n".join(lines[:-1])


def missing(rank: int) -> str:
    """A parameter takes no part in the loss, without find_unused_parameters."""
    ddp = DistributedDataParallel(Given("used", "unused"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with redirect_stderr(io.StringIO()) as logged:
        ddp({"used": 1.0}).backward()
    texts = [logged.getvalue().rstrip()]
    dist.barrier()  # so that both ranks answer in time
    try:
        optimizer.step()
    except RuntimeError as error:
        texts.append(f"RuntimeError: {error}")
    return "\n\n".join(texts)


def every_micro_batch(rank: int) -> str:
    """Four micro-batches per optimizer step, with and without `no_sync`: messages and bytes."""
    lines = []
    for uses_no_sync in (False, True):
        ddp = Bucketed(small_net(), cap_bytes=int(CAP_MIB * MIB))
        examples = examples_of(rank).chunk(4)
        local, reduced = (examples[:-1], examples[-1:]) if uses_no_sync else ((), examples)
        with ddp.no_sync():
            for part in local:
                loss_of(ddp, part).backward()
        for part in reduced:
            loss_of(ddp, part).backward()
            ddp.synchronize()
        nbytes = sum(message.nbytes for message in ddp.wire.sent)
        name = "with no_sync" if uses_no_sync else "without"
        lines.append(f"{name:12}  {len(ddp.wire.sent):2} messages  {nbytes:11,} bytes")
    return "\n".join(lines)
