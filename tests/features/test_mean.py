"""Which mean the gradients become: of the ranks, or weighted by rank (PyTorch's issue 37359)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import minddp
from tests.features.beside import Trail, assert_same, random, snapshot
from tests.ranks import of_all_ranks, on_ranks


class Net(nn.Module):
    """Layers of different kinds; the last one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.waves = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.body = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        y = self.body(x + self.words(torch.arange(len(x)))) + (self.waves * x).abs()
        return y + self.extra(y) if extra else y


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "batched views": {"gradient_as_bucket_view": True, "batched_grad_copy": True},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
}


def _gradients(rank: int, options: dict[str, Any], weights: list[float] | None, accumulates: bool) -> Trail:
    """Three steps with micro-batches of which rank 1 leaves a layer out, if unused ones are to be found."""
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(Net(), **options)
    trail = []
    for step in range(3):
        for batch in range(2 if accumulates else 1):
            last = not accumulates or batch == 1
            x = random(3, 4, rank=rank, step=10 * step + batch)
            with nullcontext() if last else ddp.no_sync():
                if weights is not None and last and step % 2:
                    ddp.weigh(weights[rank])
                output = ddp(x, extra=_uses_extra(options, rank))
                if weights is not None and last and not step % 2:
                    ddp.weigh(weights[rank])
                output.square().sum().backward()
        trail.append(snapshot(ddp))
        ddp.zero_grad(set_to_none=step != 0)
    return trail


def _uses_extra(options: dict[str, Any], rank: int) -> bool:
    return not (options.get("find_unused_parameters") and rank == 1)


def _expected(rank: int, options: dict[str, Any], weights: list[float], accumulates: bool) -> Trail:
    """Each rank's own gradients, times weight, summed in double precision."""
    torch.manual_seed(0)
    net = Net()
    trail = []
    for step in range(3):
        net.zero_grad()
        for batch in range(2 if accumulates else 1):
            x = random(3, 4, rank=rank, step=10 * step + batch)
            net(x, extra=_uses_extra(options, rank)).square().sum().backward()
        sums = {}
        for name, param in net.named_parameters():
            own = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
            total = torch.view_as_real(own) if own.is_complex() else own
            total = total.double() * weights[rank]
            dist.all_reduce(total)
            sums[name] = torch.view_as_complex(total) if own.is_complex() else total
        trail.append(sums)
    return trail


def _dense(snapshot: dict[str, Any], name: str) -> torch.Tensor:
    if f"{name}.grad values" not in snapshot:
        return snapshot[f"{name}.grad"]
    indices, values = snapshot[f"{name}.grad indices"], snapshot[f"{name}.grad values"]
    return torch.sparse_coo_tensor(indices, values, snapshot[name].shape).to_dense()


@on_ranks(3)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weighted_means(rank: int, options: dict[str, Any], accumulates: bool) -> None:
    weights = [3.0, 0.5, 0.0]
    got = _gradients(rank, options, weights, accumulates)
    divisor = sum(weights)
    wanted = _expected(rank, options, weights, accumulates)
    for ours, sums in zip(got, wanted, strict=True):
        for name, total in sums.items():
            grad = _dense(ours, f"module.{name}")
            torch.testing.assert_close(grad, (total / divisor).to(grad.dtype), rtol=1e-4, atol=1e-6)


@on_ranks(3)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["batched views"]])
def test_equal_weights_are_the_plain_mean_to_the_bit(rank: int, options: dict[str, Any]) -> None:
    plain = _gradients(rank, options, None, accumulates=False)
    weighted = _gradients(rank, options, [4.0, 4.0, 4.0], accumulates=False)
    assert_same(plain, weighted, f"rank {rank}")


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_nan_on_a_rank_of_weight_zero_does_not_reach_the_mean(rank: int, options: dict[str, Any]) -> None:
    """Rank 1 has nothing but padding, whose mean loss and gradients are NaN."""
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 1, bias=False), **options)
    grads = []
    for _ in range(2):
        ddp.zero_grad()
        x = torch.ones(3, 2)
        counts = torch.full((3, 1), rank == 0)
        ddp.weigh(counts.sum().item())
        ((ddp(x) * counts).sum() / counts.sum()).backward()
        assert rank == 0 or ddp.module.weight.grad.isfinite().all()
        grads += ddp.module.weight.grad.flatten().tolist()
    assert grads == [1.0] * 4


class Lasting(nn.Module):
    """`extra` has a gradient before the first step, and no rank ever uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)
        self.body = nn.Linear(2, 2)
        for param in self.extra.parameters():
            param.grad = torch.full_like(param, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@on_ranks(3)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("weighs", [False, True])
def test_a_gradient_that_no_rank_has_used_stays_as_it_is(rank: int, weighs: bool, views: bool) -> None:
    ddp = minddp.DistributedDataParallel(Lasting(), find_unused_parameters=True, gradient_as_bucket_view=views)
    for _ in range(3):
        if weighs:
            ddp.weigh(1.0 + rank)
        ddp(torch.ones(1, 2)).sum().backward()
        grads = [param.grad for param in ddp.module.extra.parameters()]
        for grad in grads:  # with views but for rounding, as in torch
            torch.testing.assert_close(grad, torch.full_like(grad, 0.1), rtol=1e-6 if views else 0.0, atol=0.0)
        assert all(all(map(torch.equal, grads, of_rank)) for of_rank in of_all_ranks(grads))
        ddp.module.body.zero_grad()


@on_ranks(2)
def test_a_weight_is_for_the_forward_that_it_was_given_for(rank: int) -> None:
    """The gradient of each way, or the error; and that of a step after it."""
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))

    def forward(*, trains: bool = True) -> torch.Tensor:
        with torch.set_grad_enabled(trains):
            return ddp(torch.full((1, 1), float(rank))).sum()

    def weigh() -> None:
        ddp.weigh(1.0 + 2.0 * rank)

    def dropped() -> torch.Tensor:
        weigh()
        forward()
        return forward()

    def weighed_again() -> torch.Tensor:
        weigh()
        forward()
        weigh()
        return forward()

    def both() -> torch.Tensor:
        loss = forward() + forward()
        weigh()
        return loss

    def evaluated() -> torch.Tensor:
        weigh()
        forward(trains=False)
        return forward()

    seen: dict[str, float | str] = {}
    for loss in (dropped, weighed_again, both, evaluated):
        for name, make in ((loss.__name__, loss), (f"after {loss.__name__}", forward)):
            ddp.zero_grad()
            try:
                make().backward()
                seen[name] = ddp.module.weight.grad.item()
            except RuntimeError as error:
                seen[name] = str(error)
    assert "called before an earlier forward" in seen.pop("dropped")
    assert seen.pop("both") == 1.5
    assert [seen.pop("weighed_again"), seen.pop("evaluated")] == [0.75] * 2
    assert list(seen.values()) == [0.5] * 4


# ------------------------------------------------------------------ errors


@on_ranks(2)
def test_what_contradicts_itself_is_refused(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
    for weight, text in ((-1.0, r"-1\.0"), (float("nan"), "nan"), (float("inf"), "inf")):
        with pytest.raises(ValueError, match=text):
            ddp.weigh(weight)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="`weigh` and a communication hook exclude each other"):
        ddp.weigh(1.0)


@on_ranks(2)
def test_a_hook_that_would_not_see_a_weight_is_refused(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 1))
    ddp.weigh(rank + 1)
    with pytest.raises(RuntimeError, match="`weigh` has been called for the next backward"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


@on_ranks(2)
def test_when_all_weights_are_zero_there_is_no_mean(rank: int) -> None:
    """And the next step works."""
    ddp = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with pytest.raises(RuntimeError, match="weight 0"):
        ddp.weigh(0.0)
    ddp(torch.ones(1, 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.0
