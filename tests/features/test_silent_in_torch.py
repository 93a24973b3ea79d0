"""Scripts whose gradients torch leaves wrong without a word: an error, a warning, or the right result."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.logs import logged
from tests.ranks import of_all_ranks, on_ranks

ONE_EACH = [1e-6]  # MiB: one bucket for each parameter


class Branches(nn.Module):
    """`first`, then the branches that are asked for. The branches are of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.branches = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        y = self.first(x)
        for branch in used:
            y = self.branches[branch](y)
        return y


def wrapped(**options: Any) -> Any:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(Branches(), bucket_cap_mb_list=ONE_EACH, stuck_after_s=1.0, **options)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(3, 2)


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in module.parameters()]


def mean_grads(batches: list[tuple[torch.Tensor, tuple[int, ...]]]) -> list[torch.Tensor | None]:
    """Of one module that sees the batches of all ranks."""
    torch.manual_seed(0)
    module = Branches()
    for x, used in batches:
        (module(x, *used).square().sum() / len(batches)).backward()
    return grads(module)


def assert_close(ours: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> None:
    torch.testing.assert_close([g for g in ours if g is not None], [g for g in right if g is not None])
    assert [g is None for g in ours] == [g is None for g in right]


# ------------------------------------------------------------------ the module changes


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"lazy_bucket_allocation": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("when", [1, 3])
def test_a_rank_changes_the_strides_of_its_parameters(rank: int, when: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 3)
    ddp = minddp.DistributedDataParallel(module, **options)
    for step in range(5):
        if step == when and rank == 1:
            module.to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        (mean,) = torch.autograd.grad(module(x).square().mean(), [module.weight])
        mean = mean.contiguous() / 2
        dist.all_reduce(mean)
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        torch.testing.assert_close(module.weight.grad, mean)


@on_ranks(2)
def test_a_layer_is_unfrozen_in_every_other_step(rank: int) -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)))
    module[6].requires_grad_(False)
    ddp = minddp.DistributedDataParallel(module)
    for step in range(5):
        module[6].requires_grad_(step == 4)
        with pytest.raises(RuntimeError, match=r"not reduced: `6\.weight`") if step == 4 else nullcontext():
            ddp(batch(rank, step)).sum().backward()


# ------------------------------------------------------------------ right in minddp alone


@on_ranks(2)
@pytest.mark.parametrize("wrap", [TorchDDP, minddp.DistributedDataParallel])
def test_a_copy_of_a_static_graph_averages(rank: int, wrap: type[nn.Module]) -> None:
    ddp = wrap(nn.Linear(2, 2), static_graph=True)
    for step in range(2):
        ddp(batch(rank, step)).sum().backward()
    copied = copy.deepcopy(ddp)
    copied.zero_grad()
    copied(batch(rank)).square().sum().backward()
    assert all(map(torch.equal, *of_all_ranks(grads(copied)))) == (wrap is not TorchDDP)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [TorchDDP, minddp.DistributedDataParallel])
def test_a_backward_that_creates_a_graph_averages(rank: int, wrap: type[nn.Module]) -> None:
    ddp = wrap(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="in-place") if wrap is TorchDDP else nullcontext():
        ddp(batch(rank)).square().sum().backward(create_graph=True)
        assert all(map(torch.equal, *of_all_ranks(grads(ddp))))


# ------------------------------------------------------------------ an exception before the first gradient


@on_ranks(2)
def test_a_rank_that_drops_a_backward_before_its_first_gradient_is_warned(rank: int) -> None:
    """On rank 1 alone, as soon as backward has entered the output."""
    ddp = wrapped()
    with logged() as texts:
        for step in range(4 + rank):
            output = ddp(batch(rank, step), 0, 1, 2)
            if rank == 1 and step == 2:
                output = output * 1
                output.grad_fn.next_functions[0][0].register_hook(lambda *_: 1 / 0)
            try:
                output.sum().backward()
            except ZeroDivisionError:
                ddp.zero_grad()
    warned = [text for text in texts if "An exception has ended" in text]
    assert len(warned) == rank
    assert all("ended backward 3 on rank 1" in text and "on every rank" in text for text in warned)


# ------------------------------------------------------------------ delayed parameters


@on_ranks(2)
@pytest.mark.parametrize("used", [[(1, 0), (2, 1, 0)], [(1, 0), (2,)]], ids=["other order", "no trigger"])
def test_delayed_parameters_are_reduced_in_the_order_of_the_plan(rank: int, used: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    module = Branches()
    ddp = minddp.DistributedDataParallel(
        module,
        bucket_cap_mb_list=ONE_EACH,
        find_unused_parameters=True,
        delay_all_reduce_named_params=[("branches.0.weight", module.branches[0].weight)],
        param_to_hook_all_reduce=module.branches[1].weight,
    )
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step), *used[rank]).square().sum().backward()
        assert_close(grads(module), mean_grads([(batch(other, step), used[other]) for other in (0, 1)]))


# ------------------------------------------------------------------ buckets that are skipped


@on_ranks(2)
@pytest.mark.parametrize(
    ("used", "accumulated", "offenders"),
    [
        ([[0], [1]], [], ["branches.1.weight", "branches.0.weight"]),
        ([[0], [0]], [2], ["branches.2.weight"] * 2),
    ],
    ids=["other branches", "only accumulated"],
)
def test_a_skipped_bucket_that_any_rank_has_used_is_an_error(
    rank: int, used: list[list[int]], accumulated: list[int], offenders: list[str]
) -> None:
    ddp = wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    if accumulated:
        with ddp.no_sync():
            ddp(batch(rank), *accumulated).sum().backward()
    with pytest.raises(RuntimeError, match="skip_all_reduce_unused_params") as error:
        ddp(batch(rank), *used[rank]).sum().backward()
    assert f"rank {rank}" in str(error.value)
    assert f"`{offenders[rank]}`" in str(error.value)
    with pytest.raises(RuntimeError, match="averaged"):
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()


@on_ranks(2)
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_skipped_gradient_is_not_scaled(rank: int, option: str) -> None:
    ddp = wrapped(gradient_as_bucket_view=True, skip_all_reduce_unused_params=True, **{option: True})
    for step in range(3):
        ddp(batch(rank, step), 0, 1).square().sum().backward()
        kept = ddp.module.branches[2].weight
        if step == 0:
            kept.grad = torch.ones_like(kept)
        assert step == 0 or torch.equal(kept.grad, torch.ones_like(kept))


@on_ranks(2)
def test_a_static_graph_skips_what_no_rank_uses(rank: int) -> None:
    used = [(0,), (1,)]
    ddp = wrapped(static_graph=True, skip_all_reduce_unused_params=True)
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step), *used[rank]).square().sum().backward()
        assert_close(grads(ddp), mean_grads([(batch(other, step), used[other]) for other in (0, 1)]))


@on_ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_a_static_graph_that_accumulates_what_it_never_reduces_is_warned_of(rank: int, skips: bool) -> None:
    ddp = wrapped(static_graph=True, skip_all_reduce_unused_params=skips)
    ddp(batch(rank), 0).sum().backward()
    with logged() as texts, ddp.no_sync():
        for _ in range(2):
            ddp(batch(rank), 2).sum().backward()
    [text] = texts
    assert f"rank {rank} accumulates a gradient of `branches.2.weight`" in text


# ------------------------------------------------------------------ a survivor that has not finalized the recording


@on_ranks(3)
def test_survivors_record_a_static_graph_again_unless_all_have(rank: int) -> None:
    ddp = wrapped(static_graph=True)
    if rank == 1:

        def lose_connection() -> None:
            raise RuntimeError("Connection reset by peer.")

        ddp._reducer.usage_tracker.usage.finish_exchange = lose_connection
    with suppress(RuntimeError):
        ddp(batch(rank), 0, 1).square().sum().backward()
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp.move_to_group(group)
    for step in range(1, 5):
        ddp.zero_grad()
        ddp(batch(rank, step), 0, 1).square().sum().backward()
        assert_close(grads(ddp), mean_grads([(batch(other, step), (0, 1)) for other in (0, 1)]))
    plans = [None, None]
    dist.all_gather_object(plans, str(ddp.plan), group)
    assert plans[0] == plans[1]


# ------------------------------------------------------------------ gradients that stay local, or do not


@on_ranks(2)
def test_a_second_backward_that_stays_local_is_warned_of_once(rank: int) -> None:
    ddp = wrapped()
    with logged() as texts:
        for step in range(2):
            first, second = ddp(batch(rank, step), 0, 1, 2), ddp(batch(rank, step), 0, 1, 2)
            first.sum().backward()
            second.sum().backward()
    [warned] = [text for text in texts if "were not averaged" in text]
    assert f"rank {rank}" in warned
    assert "`branches.2.weight`" in warned


@on_ranks(2)
def test_a_backward_under_no_sync_that_is_reduced_is_warned_of_once(rank: int) -> None:
    ddp = wrapped()
    with logged() as texts:
        for _ in range(2):
            ddp(batch(rank), 0, 1, 2)
            with ddp.no_sync():
                ddp(batch(rank), 0, 1, 2).sum().backward()
    [warned] = [text for text in texts if "no_sync" in text]
    assert f"Rank {rank}" in warned


@on_ranks(2)
def test_ordinary_accumulation_is_not_warned_of(rank: int) -> None:
    ddp = wrapped()
    with logged() as texts:
        for step in range(3):
            with ddp.no_sync():
                ddp(batch(rank, step), 0, 1, 2).sum().backward()
            ddp(batch(rank, step), 0, 1, 2).sum().backward()
            with torch.no_grad():
                ddp(batch(rank, step), 0)
    assert texts == []
