"""Uneven inputs under `join`: the same bits as torch's on every rank, and the cases that torch hangs in."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import minddp
from tests.features.beside import Trail, Wrap, play, play_over, random, snapshot
from tests.modules import Heads
from tests.parity.hooks import HOOKS
from tests.ranks import of_all_ranks, on_ranks


class Net(nn.Module):
    """BatchNorm for buffers, and a branch that a step may leave out."""

    def __init__(self, has_buffers: bool = True):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if has_buffers else nn.Identity()
        self.branch = nn.Linear(6, 6)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, branch: bool = True, all_used: bool = True) -> torch.Tensor:
        y = self.norm(self.first(x))
        if branch:
            y = torch.relu(self.branch(y))
        y = self.last(y)
        return y + self.never.weight.sum() + self.never.bias.sum() if all_used else y


def train(wrap: Wrap, rank: int, case: dict[str, Any], steps_of_rank: list[int]) -> Trail:
    """As many steps as `steps_of_rank` says under `join`, then two more on every rank."""
    torch.manual_seed(0)
    options = case.get("options", {})
    finds_unused = options.get("find_unused_parameters", False)
    ddp = wrap(Net(case.get("has_buffers", True)), **options)
    if case.get("hook"):
        ddp.register_comm_hook(*HOOKS[case["hook"]]())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    trail = []

    def step(number: int, synchronised: bool = True) -> None:
        x = random(3, 4, rank=rank, step=number)
        with nullcontext() if synchronised else ddp.no_sync():
            leaves_branch_out = finds_unused and number == rank  # one rank at a time, while no rank has run out
            output = ddp(x, branch=not leaves_branch_out, all_used=not finds_unused)
            output.square().sum().backward()
        trail.append(snapshot(ddp))
        if synchronised:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)

    with ddp.join(**case.get("join", {})):
        for number in range(steps_of_rank[rank]):
            step(number, synchronised=not case.get("accumulates") or number % 2 == 1)
    trail.append(snapshot(ddp))
    optimizer.zero_grad()
    for number in range(10, 12):
        step(number)
    return trail


BY_ACTIVE = {"join": {"divide_by_initial_world_size": False}}
CASES: dict[str, dict[str, Any]] = {
    "all divide": {},
    "active ones divide": BY_ACTIVE,
    "enable=False": {"join": {"enable": False}},
    "no buffers": {"has_buffers": False},
    "buffers left alone": {"options": {"forward_sync_buffers": False}},
    "accumulation": {"accumulates": True},
    "unused": {"options": {"find_unused_parameters": True}},
    "unused, active ones divide": {"options": {"find_unused_parameters": True}, **BY_ACTIVE},
    "static graph": {"options": {"static_graph": True}},
    "static graph, small buckets": {"options": {"static_graph": True, "bucket_cap_mb": 0.00005}},
    "views": {"options": {"gradient_as_bucket_view": True}, **BY_ACTIVE},
    "batched": {"options": {"batched_grad_copy": True}, **BY_ACTIVE},
    "small buckets": {"options": {"bucket_cap_mb": 0.0001}},
    "hook": {"hook": "allreduce"},
    "hook, active ones divide": {"hook": "fp16_compress", **BY_ACTIVE},
    "PowerSGD": {"hook": "power_sgd"},
}
"""Cases in which torch's wrapper works, too."""


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_torchs(rank: int, case: str) -> None:
    steps_of_rank = [5, 5] if case == "enable=False" else [6, 2]
    assert len(play(rank, train, CASES[case], steps_of_rank)) == steps_of_rank[rank] + 3


@pytest.mark.parametrize(
    ("case", "steps_of_rank"),
    [
        *itertools.product(["all divide", "active ones divide", "views"], [[1, 4, 2], [4, 0, 1], [0, 3, 3]]),
        ("static graph, small buckets", [2, 4, 3]),  # torch needs two steps of each rank for that
    ],
)
def test_bits_are_torchs_on_three_ranks(ranks: Any, case: str, steps_of_rank: list[int]) -> None:
    """Also where a rank has no input at all, so that it has never seen the order of a backward."""
    ranks(3).run(play, train, CASES[case], steps_of_rank)


@pytest.mark.parametrize("case", ["all divide", "unused", "views"])
def test_bits_are_torchs_over_shared_memory(ranks: Any, case: str) -> None:
    ranks(2).run(play_over, "shared_memory", train, CASES[case], [6, 2])


# ------------------------------------------------------------------ beside other joinables


def _train_with_zero(wrap: Wrap, rank: int, joins: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(Net(), bucket_cap_mb=0.0001)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    trail = []
    with Join([ddp, optimizer], **joins):
        for step in range(5 - 3 * rank):
            ddp(random(3, 4, rank=rank, step=step)).square().sum().backward()
            trail.append(snapshot(ddp))
            optimizer.step()
            optimizer.zero_grad()
    return [*trail, snapshot(ddp)]


@pytest.mark.parametrize("joins", [{}, {"divide_by_initial_world_size": False}], ids=["all", "active"])
def test_a_sharded_optimizer_joins_too(ranks: Any, joins: dict[str, Any]) -> None:
    ranks(2).run(play, _train_with_zero, joins)


def _train_two(wrap: Wrap, rank: int) -> Trail:
    torch.manual_seed(0)
    one, other = wrap(Net()), wrap(Net(has_buffers=False), gradient_as_bucket_view=True)
    trail = []
    with Join([one, other], divide_by_initial_world_size=False):
        for step in range(2 + 2 * rank):
            x = random(3, 4, rank=rank, step=step)
            for ddp in (one, other):  # each to its end: that is the order in which joined ranks take part
                ddp.zero_grad()
                ddp(x).square().sum().backward()
                trail.append(snapshot(ddp))
    return [*trail, snapshot(one), snapshot(other)]


def test_two_modules_join_together(ranks: Any) -> None:
    """As in torch, only the first one divides by the active ranks: only it announces its forwards."""
    ranks(2).run(play, _train_two)


# ------------------------------------------------------------------ ends and errors


@on_ranks(2)
def test_early_termination_has_torchs_texts_on_every_rank(rank: int) -> None:
    """When rank 1 runs out. Afterwards both must work."""
    texts = []
    for wrap in (nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel):
        ddp = wrap(Net())
        try:
            with ddp.join(throw_on_early_termination=True):
                for step in range(3 - rank):
                    ddp(random(3, 4, step=step)).sum().backward()
            texts.append("no error")
        except RuntimeError as error:
            texts.append(str(error))
        with ddp.join(enable=False):
            ddp(torch.ones(2, 4)).sum().backward()
    theirs, ours = texts
    assert ["Detected at least one rank that exhausted inputs", "Rank 1 exhausted all inputs"][rank] in theirs
    assert ours == theirs


@on_ranks(2)
def test_what_a_rank_without_inputs_cannot_follow_is_refused(rank: int) -> None:
    small = {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}
    net = Net()
    delayed = {
        "delay_all_reduce_named_params": [("branch.weight", net.branch.weight)],
        "param_to_hook_all_reduce": net.first.weight,
    }
    for module, options, text in (
        (Net(), small, "skip_all_reduce_unused_params"),
        (net, delayed, "delay_all_reduce_named_params"),
        (Net(), {"bucket_cap_mb": "auto"}, 'bucket_cap_mb="auto"'),
    ):
        with pytest.raises(ValueError, match="join") as error:
            minddp.DistributedDataParallel(module, **options).join()
        assert text in str(error.value)
    ddp = minddp.DistributedDataParallel(Net())
    with ddp.join(), pytest.raises(ValueError, match="`weigh` and join exclude each other"):
        ddp.weigh(1.0)


# ------------------------------------------------------------------ where torch hangs or goes wrong


@on_ranks(2)
def test_an_unused_parameter_keeps_its_missing_gradient(rank: int) -> None:
    """Torch's joined ranks answer with uninitialised memory, so that everything seems used.

    Only rank 0 has inputs. The branch goes unused in step 1, one layer in all; rank 1 joins at once. Averages times
    the number of ranks are the gradients of rank 0 alone.
    """
    torch.manual_seed(0)
    alone, ddp = Net(), minddp.DistributedDataParallel(Net(), find_unused_parameters=True)
    alone.load_state_dict(ddp.module.state_dict())
    with ddp.join():
        for step in range(4 if rank == 0 else 0):
            for module in (alone, ddp):
                module.zero_grad()
                module(random(3, 4, step=step), branch=step != 1, all_used=False).square().sum().backward()
            for (name, param), lone in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
                if lone.grad is None:
                    assert param.grad is None, (name, step)
                else:
                    torch.testing.assert_close(param.grad, lone.grad / dist.get_world_size())


@on_ranks(2)
@pytest.mark.parametrize("steps_of_rank", [[3, 0], [0, 1], [1, 0], [2, 1]])
def test_a_static_graph_can_be_recorded_late(rank: int, steps_of_rank: list[int]) -> None:
    """Some ranks have no or one input only; afterwards all train on.

    The first backward of a static graph exchanges more than others; torch's joined ranks do not join in.
    """
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(Net(), static_graph=True, bucket_cap_mb=0.0001)

    def step(number: int) -> None:
        ddp.zero_grad()
        ddp(random(3, 4, rank=rank, step=number), all_used=False).square().sum().backward()

    with ddp.join():
        for number in range(steps_of_rank[rank]):
            step(number)
    for number in range(10, 14):
        step(number)
        assert ddp.module.never.weight.grad is None
        grads = [param.grad for param in ddp.parameters() if param.grad is not None]
        assert all(map(torch.equal, *of_all_ranks(grads)))
        assert all(grad.any() for grad in grads)


@on_ranks(2)
def test_forwards_without_gradients_are_not_shadowed_by_a_backward(rank: int) -> None:
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(Net())
    with ddp.join():
        for step in range(4 - 2 * rank):
            ddp(random(3, 4, rank=rank, step=step)).sum().backward()
            with torch.no_grad():
                ddp(torch.ones(2, 4))
    assert all(map(torch.equal, *of_all_ranks([param.detach() for param in ddp.parameters()])))


@on_ranks(2)
def test_after_the_context_all_ranks_divide_again(rank: int) -> None:
    """Torch goes on dividing by the number of ranks that were active last."""
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    x = torch.ones(1, 1)
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(3 - 2 * rank):
            ddp(x).sum().backward()
        if rank == 0:  # this backward is not reduced, so the count that its forward received stays unused
            with ddp.no_sync():
                ddp(x).sum().backward()
    with ddp.join(enable=False):
        ddp.zero_grad()
        ddp(x).sum().backward()
    assert ddp.module.weight.grad.item() == 1.0


@on_ranks(2)
@pytest.mark.parametrize("after_forward", [False, True])
def test_buffer_hooks_are_shadowed(rank: int, after_forward: bool) -> None:
    """The mean of the running means, also from ranks that have run out."""
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(Net())

    def hook(_state: object, buffers: dict[str, torch.Tensor]) -> list[Any]:
        mean = buffers["norm.running_mean"]
        mean /= dist.get_world_size()
        return [dist.all_reduce(mean, async_op=True).get_future()]

    ddp.register_buffer_hook(None, hook, after_forward=after_forward)
    with ddp.join():
        for step in range(1 + 2 * rank):
            ddp(random(3, 4, rank=rank, step=step)).sum().backward()
    assert torch.equal(*of_all_ranks(ddp.module.norm.running_mean))


@on_ranks(2)
def test_a_rank_may_run_out_amid_accumulation(rank: int) -> None:
    """Rank 1 ends with a micro-batch that was never reduced; the other ranks do not get it, rank 1 keeps it."""
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), find_unused_parameters=True)
    with ddp.join():
        for step in range(4 if rank == 0 else 3):
            with nullcontext() if step % 2 else ddp.no_sync():
                ddp(torch.full((1, 1), float(step + 1))).sum().backward()
            if step == 1:
                ddp.zero_grad()
    assert ddp.module.weight.grad.item() == [(3 + 4) / 2, 3.0][rank]


@on_ranks(2)
def test_a_backward_for_each_output_is_refused(rank: int) -> None:
    """A rank without inputs would take part in the first of them only."""
    ddp = minddp.DistributedDataParallel(Heads(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="a rank that has run out of inputs would not take part"), ddp.join():
        for _ in range(2 - rank):
            left, right = ddp(torch.ones(1, 2))
            left.sum().backward()
            right.sum().backward()


@on_ranks(2)
def test_a_loss_of_one_output_is_not(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(Heads(), find_unused_parameters=True)
    with ddp.join():
        for _ in range(2 - rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 2))[0].sum().backward()
    assert rank == 1 or ddp.module.left.bias.grad.tolist() == [0.5, 0.5]
