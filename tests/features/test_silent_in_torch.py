"""Scripts whose gradients torch leaves wrong without a word: an error, a warning, or the right result."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.logs import logged

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


# ------------------------------------------------------------------ an exception before the first gradient


def _raise_first(rank: int) -> list[str]:
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
    return [text for text in texts if "An exception has ended" in text]


def test_a_rank_that_drops_a_backward_before_its_first_gradient_is_warned(ranks: Any) -> None:
    calm, [warned] = ranks(2).run(_raise_first)
    assert not calm
    assert "ended backward 3 on rank 1" in warned
    assert "on every rank" in warned


# ------------------------------------------------------------------ delayed parameters


def _delayed(rank: int, used: list[tuple[int, ...]]) -> None:
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


@pytest.mark.parametrize("used", [[(1, 0), (2, 1, 0)], [(1, 0), (2,)]], ids=["other order", "no trigger"])
def test_delayed_parameters_are_reduced_in_the_order_of_the_plan(ranks: Any, used: list[tuple[int, ...]]) -> None:
    ranks(2).run(_delayed, used)


# ------------------------------------------------------------------ buckets that are skipped


def _skips(rank: int, used: list[list[int]], accumulated: list[int]) -> str:
    ddp = wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    if accumulated:
        with ddp.no_sync():
            ddp(batch(rank), *accumulated).sum().backward()
    try:
        ddp(batch(rank), *used[rank]).sum().backward()
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match="averaged"):
            torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("used", "accumulated", "offenders"),
    [
        ([[0], [1]], [], ["branches.1.weight", "branches.0.weight"]),
        ([[0], [0]], [2], ["branches.2.weight"] * 2),
    ],
    ids=["other branches", "only accumulated"],
)
def test_a_skipped_bucket_that_any_rank_has_used_is_an_error(
    ranks: Any, used: list[list[int]], accumulated: list[int], offenders: list[str]
) -> None:
    for rank, text in enumerate(ranks(2).run(_skips, used, accumulated)):
        assert f"rank {rank}" in text
        assert f"`{offenders[rank]}`" in text
        assert "skip_all_reduce_unused_params" in text


def _keeps(rank: int, options: dict[str, bool], used: list[list[int]]) -> None:
    ddp = wrapped(gradient_as_bucket_view=True, skip_all_reduce_unused_params=True, **options)
    for step in range(3):
        ddp(batch(rank, step), *used[rank]).square().sum().backward()
        kept = ddp.module.branches[2].weight
        if step == 0:
            kept.grad = torch.ones_like(kept)
        assert step == 0 or torch.equal(kept.grad, torch.ones_like(kept))


def test_a_skipped_gradient_is_not_scaled(ranks: Any) -> None:
    ranks(2).run(_keeps, {"find_unused_parameters": True}, [[0, 1]] * 2)
    ranks(2).run(_keeps, {"static_graph": True}, [[0, 1]] * 2)


def _static(rank: int) -> None:
    used = [(0,), (1,)]
    ddp = wrapped(static_graph=True, skip_all_reduce_unused_params=True)
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step), *used[rank]).square().sum().backward()
        assert_close(grads(ddp), mean_grads([(batch(other, step), used[other]) for other in (0, 1)]))


def test_a_static_graph_skips_what_no_rank_uses(ranks: Any) -> None:
    ranks(2).run(_static)


def _accumulates_other(rank: int, skips: bool) -> list[str]:
    ddp = wrapped(static_graph=True, skip_all_reduce_unused_params=skips)
    ddp(batch(rank), 0).sum().backward()
    with logged() as texts, ddp.no_sync():
        for _ in range(2):
            ddp(batch(rank), 2).sum().backward()
    return texts


@pytest.mark.parametrize("skips", [False, True])
def test_a_static_graph_that_accumulates_what_it_never_reduces_is_warned_of(ranks: Any, skips: bool) -> None:
    for rank, [text] in enumerate(ranks(2).run(_accumulates_other, skips)):
        assert f"rank {rank} accumulates a gradient of `branches.2.weight`" in text


# ------------------------------------------------------------------ a survivor that has not finalized the recording


def _survive(rank: int) -> list[Any]:
    ddp = wrapped(static_graph=True)
    if rank == 1:

        def lose_connection() -> None:
            raise RuntimeError("Connection reset by peer.")

        ddp._reducer.usage_tracker.usage.finish_exchange = lose_connection
    with suppress(RuntimeError):
        ddp(batch(rank), 0, 1).square().sum().backward()
    group = dist.new_group([0, 1])
    if rank == 2:
        return []
    ddp.move_to_group(group)
    for step in range(1, 5):
        ddp.zero_grad()
        ddp(batch(rank, step), 0, 1).square().sum().backward()
        assert_close(grads(ddp), mean_grads([(batch(other, step), (0, 1)) for other in (0, 1)]))
    return [str(ddp.plan)]


def test_survivors_record_a_static_graph_again_unless_all_have(ranks: Any) -> None:
    first, second, _ = ranks(3).run(_survive)
    assert first == second


# ------------------------------------------------------------------ gradients that stay local, or do not


def _two_forwards(rank: int) -> list[str]:
    ddp = wrapped()
    with logged() as texts:
        for step in range(2):
            first, second = ddp(batch(rank, step), 0, 1, 2), ddp(batch(rank, step), 0, 1, 2)
            first.sum().backward()
            second.sum().backward()
    return [text for text in texts if "were not averaged" in text]


def test_a_second_backward_that_stays_local_is_warned_of_once(ranks: Any) -> None:
    for rank, warned in enumerate(ranks(2).run(_two_forwards)):
        assert len(warned) == 1
        assert f"rank {rank}" in warned[0]
        assert "`branches.2.weight`" in warned[0]


def _forward_without_backward(rank: int) -> list[str]:
    ddp = wrapped()
    with logged() as texts:
        for _ in range(2):
            ddp(batch(rank), 0, 1, 2)
            with ddp.no_sync():
                ddp(batch(rank), 0, 1, 2).sum().backward()
    return [text for text in texts if "no_sync" in text]


def test_a_backward_under_no_sync_that_is_reduced_is_warned_of_once(ranks: Any) -> None:
    for rank, warned in enumerate(ranks(2).run(_forward_without_backward)):
        assert len(warned) == 1
        assert f"Rank {rank}" in warned[0]


def _accumulate(rank: int) -> list[str]:
    ddp = wrapped()
    with logged() as texts:
        for step in range(3):
            with ddp.no_sync():
                ddp(batch(rank, step), 0, 1, 2).sum().backward()
            ddp(batch(rank, step), 0, 1, 2).sum().backward()
            with torch.no_grad():
                ddp(batch(rank, step), 0)
    return texts


def test_ordinary_accumulation_is_not_warned_of(ranks: Any) -> None:
    assert ranks(2).run(_accumulate) == [[], []]
