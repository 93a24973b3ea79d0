"""The caller of backward may finalize it later: `require_manual_backward_finalization`, as in torch after 2.13."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import minddp
from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from tests.parity.compare import difference
from tests.ranks import on_ranks
from tests.surface.models import TwoLayers, batch


def torchs_rule(options: dict[str, Any]) -> int:
    """In how many first steps the averages come after backward: until the buckets are rebuilt."""
    return 2 if "static_graph" in options else 0 if "find_unused_parameters" in options else 1


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    ],
)
def test_averages_are_there_when_it_is_finalized(rank: int, options: dict[str, Any]) -> None:
    """As those of a wrapper that finalizes by itself."""
    ddp, plain = (minddp.DistributedDataParallel(TwoLayers(), **options) for _ in range(2))
    ddp.require_manual_backward_finalization = True
    for step in range(4):
        both = not (options and step % 2)  # with options, parameters may go unused
        both = both and "static_graph" not in options
        ddp.zero_grad()
        plain.zero_grad()
        output = ddp(batch(rank, step), both=both)
        assert ddp.should_finalize_after_backward == (step < torchs_rule(options)), step
        output.sum().backward()
        assert ddp._reducer.phase is Phase.REDUCING, step
        ddp.finalize_backward()
        plain(batch(rank, step), both=both).sum().backward()
        for (name, ours), theirs in zip(ddp.named_parameters(), plain.parameters(), strict=True):
            assert difference(theirs.grad, ours.grad) is None, f"step {step}: {name}"


LOW = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"mixed_precision": LOW}])
def test_an_optimizer_may_step_within_backward(rank: int, options: dict[str, Any]) -> None:
    """All gradients of the module have arrived, while backward has still to reach what came before it."""
    ddp = minddp.DistributedDataParallel(TwoLayers(), **options)
    ddp.require_manual_backward_finalization = True
    reference = minddp.DistributedDataParallel(TwoLayers(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    stepped = torch.optim.SGD(reference.parameters(), lr=0.1)
    before = torch.ones(3, 4, requires_grad=True)
    events: list[Any] = []
    ddp._reducer.events.watch(events.append)

    def finalize_and_step(grad: torch.Tensor) -> None:
        ddp.finalize_backward()
        optimizer.step()

    for step in range(3):
        x = before * batch(rank, step)
        x.register_hook(finalize_and_step)
        ddp(x).sum().backward()
        reference(batch(rank, step)).sum().backward()
        stepped.step()
        ddp.zero_grad()
        reference.zero_grad()
    assert all(map(torch.equal, ddp.parameters(), reference.parameters()))
    assert sum(event.kind is EventKind.BACKWARD_END for event in events) == 3
    assert before.grad is not None


@on_ranks(2)
def test_what_is_not_finalized_is_noticed(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    ddp.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(
        RuntimeError, match=r"finalize_backward\(\) called but no gradient reduction requires final"
    ):
        ddp.finalize_backward()
    ddp(batch(rank))
    ddp.require_manual_backward_finalization = True  # which it is
    with pytest.raises(RuntimeError, match="cannot be called after forward while a backward pass is expected"):
        ddp.require_manual_backward_finalization = False
    ddp(batch(rank)).sum().backward()
    before = [param.detach().clone() for param in ddp.parameters()]
    for act in (optimizer.step, lambda: ddp(batch(rank))):
        with pytest.raises(
            RuntimeError, match="Expected to have finalized the prior backward pass before"
        ) as raised:
            act()
        assert ddp._get_ddp_logging_data()["error"] == str(raised.value)
    assert all(map(torch.equal, before, ddp.parameters()))
    ddp.finalize_backward()
    optimizer.step()
    ddp.require_manual_backward_finalization = False
    ddp(batch(rank)).sum().backward()
    optimizer.step()


def rules_of(make: Any, options: dict[str, Any]) -> list[Any]:
    """What the class answers and raises, as far as torch's first words."""
    seen: list[Any] = []
    ddp = make(TwoLayers(), **options)

    def attempt(act: Any) -> None:
        try:
            seen.append(act())
        except (RuntimeError, TypeError) as error:
            seen.append((type(error), re.findall("called .*? (?:finalization|required|expected)", str(error))))

    def require(value: Any) -> None:
        ddp.require_manual_backward_finalization = value

    seen.append(ddp.should_finalize_after_backward)
    attempt(ddp.finalize_backward)
    attempt(lambda: require("no"))
    require(True)
    attempt(ddp.finalize_backward)
    for _ in range(4):
        loss = ddp(batch(0)).sum()
        seen.append(ddp.should_finalize_after_backward)
        attempt(ddp.finalize_backward)
        attempt(lambda: require(False))
        attempt(lambda: require(True))
        loss.backward()
        attempt(lambda: require(False))
        ddp.finalize_backward()
        attempt(ddp.finalize_backward)
        ddp.zero_grad()
    with ddp.no_sync():
        ddp(batch(0)).sum().backward()
        attempt(ddp.finalize_backward)
    again = copy.deepcopy(ddp)
    seen.append(again.require_manual_backward_finalization)
    return seen


@on_ranks(1)
@pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="the model is torch 2.15's class")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_the_rules_are_torchs(rank: int, options: dict[str, Any]) -> None:
    theirs, ours = [rules_of(make, options) for make in (TorchDDP, minddp.DistributedDataParallel)]
    assert theirs == ours
