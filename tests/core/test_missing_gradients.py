"""The errors for gradients that did not come or came twice, and the guard that keeps optimizers from stepping."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minddp.core.missing_gradients import (
    Missing,
    OptimizerGuard,
    exchange_missing,
    ready_twice,
    unfinished_reduction,
)
from tests.fakes import FakeDDP, FakeTransport

X = torch.ones(1, 2)
FACT = "Expected to have finished reduction in the prior iteration before starting a new one"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 2)
        self.right = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


@pytest.mark.parametrize(
    ("static", "finds", "phrases"),
    [
        (False, False, ["`find_unused_parameters=True`", "`forward` function outputs participate in calculating"]),
        (False, True, ["`find_unused_parameters=True` is enabled", "not all `forward` outputs"]),
        (True, False, ["training graph has changed", "not compatible with static_graph set to True"]),
    ],
)
def test_the_error_has_torchs_phrases_and_names_parameters_and_rank(
    static: bool, finds: bool, phrases: list[str]
) -> None:
    error = unfinished_reduction(
        Missing(3, (0, 2), ("a", "b", "c.bias")), "Elsewhere.\n", static_graph=static, finds_unused=finds
    )
    text = str(error)
    assert type(error) is RuntimeError
    for phrase in [FACT, *phrases, "grad for rank 3: a, c.bias", "grad for rank 3: 0 2", "Elsewhere."]:
        assert phrase in text


def test_ranks_tell_each_other_what_is_missing() -> None:
    store = dist.HashStore()
    names = ("a", "b", "c")
    first = exchange_missing(store, "pass 1", Missing(2, (0, 1), names), 3, patience_s=0.0)
    assert first.count("reports nothing missing") == 2
    assert "Rank 0" in first
    assert "Rank 1" in first
    second = exchange_missing(store, "pass 1", Missing(0, (2,), names), 3, patience_s=0.0)
    assert "Rank 1 reports nothing missing" in second
    assert "did not receive grad for rank 2: a, b" in second
    later = exchange_missing(store, "pass 2", Missing(0, (2,), names), 3, patience_s=0.0)
    assert later.count("reports nothing missing") == 2, "what was said of another pass does not count"


def test_without_a_store_or_without_others_there_is_nothing_to_tell() -> None:
    missing = Missing(0, (0,), ("a",))
    assert exchange_missing(None, "pass 1", missing, 2) == ""
    assert exchange_missing(dist.HashStore(), "pass 1", missing, 1) == ""


def test_what_an_earlier_wrapper_missed_is_not_told_again() -> None:
    """Both ranks wrap the same model twice. Rank 1 missed something the first time only."""
    store = dist.HashStore()
    for turn in (1, 2):
        one, other = (FakeDDP(Heads(), FakeTransport(rank=rank, store=store)) for rank in (0, 1))
        one(X)[0].sum().backward()
        if turn == 1:
            other(X)[0].sum().backward()
            with pytest.raises(RuntimeError, match="did not receive grad for rank 1"):
                other(X)
        with pytest.raises(RuntimeError, match="did not receive grad for rank 0") as error:
            one(X)
        assert ("did not receive grad for rank 1" in str(error.value)) == (turn == 1)


@pytest.mark.parametrize(
    ("static", "phrase"),
    [(False, "mark a variable ready only once"), (True, "graph has changed in this iteration")],
)
def test_ready_twice_names_the_parameter(static: bool, phrase: str) -> None:
    text = str(ready_twice(4, "layer.weight", static_graph=static))
    assert phrase in text
    assert "layer.weight" in text
    assert "4" in text


def unfinished() -> tuple[Heads, FakeDDP]:
    """A wrapper on rank 1 whose last backward has left the right head out."""
    module = Heads()
    ddp = FakeDDP(module, FakeTransport(rank=1))
    ddp(X)[0].sum().backward()
    return module, ddp


def test_the_optimizer_is_stopped_in_the_same_iteration() -> None:
    module, ddp = unfinished()
    before = [param.clone() for param in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=rf"{FACT}(.|\n)*rank 1: right.weight, right.bias"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert ddp.reducer.plan is not None


def test_an_optimizer_of_part_of_the_module_is_stopped_too() -> None:
    module, ddp = unfinished()
    with pytest.raises(RuntimeError, match=FACT):
        torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [module.left.bias]}]).step()
    assert ddp.reducer.plan is not None


def test_an_unrelated_optimizer_is_not_hindered() -> None:
    _, ddp = unfinished()
    other = nn.Linear(2, 2)
    other(X).sum().backward()
    before = other.bias.clone()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert not torch.equal(other.bias, before)
    assert ddp.reducer.plan is not None


def test_the_guard_is_lifted_when_the_rest_arrives() -> None:
    module = Heads()
    ddp = FakeDDP(module)
    left, right = ddp(X)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    left.sum().backward()
    right.sum().backward()
    optimizer.step()


def test_a_complete_backward_raises_no_guard() -> None:
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module)
    for _ in range(3):
        ddp.step(X)
        torch.optim.SGD(module.parameters(), lr=1.0).step()


def test_local_gradients_may_be_stepped_on() -> None:
    """Under no_sync nothing is owed, whatever parameters the backward leaves out."""
    module = Heads()
    ddp = FakeDDP(module)
    ddp(X, sync=False)[0].sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert ddp.transport.calls == []


def test_a_lifted_guard_is_gone() -> None:
    param = nn.Parameter(torch.ones(1))

    class Owner:
        def error(self) -> Exception:
            return RuntimeError("guarded")

    owner = Owner()
    guard = OptimizerGuard([param], owner.error)
    optimizer = torch.optim.SGD([param], lr=1.0)
    with pytest.raises(RuntimeError, match="guarded"):
        optimizer.step()
    guard.lift()
    optimizer.step()
