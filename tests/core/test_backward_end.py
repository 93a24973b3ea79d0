"""Which backward is over, and was it nested in another one. See [Note: which backward ends]."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minddp.core.autograd import call_when_gradient_enters
from minddp.core.backward_end import AwaitedEnds
from tests.modules import Hidden


class Owner:
    """Notes what happens to its `AwaitedEnds`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ends = AwaitedEnds(self.on_end, self.on_failure)

    def watch(self, output: object) -> None:
        """A forward has returned `output`."""
        self.ends = AwaitedEnds(self.on_end, self.on_failure)
        self.ends.is_visible = bool(call_when_gradient_enters(output, self.on_begin))

    def on_begin(self, _unreached: set[int], place: int | None) -> None:
        self.log.append("begin")
        self.ask(at_outputs=True)

    def on_end(self, backward: int) -> None:
        self.log.append(f"end {self.ends.entry_of(backward).name}")

    def on_failure(self) -> None:
        self.log.append("failure")

    def ask(self, *_grad: torch.Tensor, at_outputs: bool = False) -> None:
        if self.ends.queue_end_callback(at_outputs=at_outputs):
            self.log.append("asked")


def asking(owner: Owner) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer in whose backward the owner requests the end."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if x.requires_grad:
            x.register_hook(owner.ask)
        return x * 1

    return layer


def source() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "log"),
    [
        (lambda layer, x: layer(layer(x)), ["asked", "end AT_OUTPUTS"]),
        (lambda layer, x: x * 2, []),
        (
            lambda layer, x: layer(checkpoint(layer, x, use_reentrant=True)),
            ["asked", "asked", "end NESTED", "end AT_OUTPUTS"],
        ),
    ],
    ids=["requested twice", "not requested", "nested"],
)
def test_each_backward_has_an_end_of_its_own(run: Callable[..., torch.Tensor], log: list[str]) -> None:
    """It is called once, however often it is requested, and that of a nested backward is reported as nested."""
    owner = Owner()
    for _ in range(2):
        run(asking(owner), source()).sum().backward()
    assert owner.log == log * 2


def test_an_end_is_awaited_until_it_has_been_called() -> None:
    """Hooks that fire within, in a further backward, belong to the one that ends. Also if it raises."""

    class Ending(Owner):
        def on_end(self, backward: int) -> None:
            self.log.append(f"awaited: {self.ends.is_any_awaited()}")
            raise KeyError("in the end")

    owner = Ending()
    with pytest.raises(KeyError, match="in the end"):
        asking(owner)(source()).sum().backward()
    assert owner.log == ["asked", "awaited: True"]
    assert not owner.ends.is_any_awaited()


@pytest.mark.parametrize("hides", [False, True])
def test_within_a_nested_forward_the_end_of_its_backward_is_the_end(hides: bool) -> None:
    """The whole module is in a reentrant checkpoint: its forward runs again in a backward."""
    owner = Owner()

    def module(x: torch.Tensor) -> torch.Tensor:
        output = asking(owner)(x)
        owner.watch(Hidden(output) if hides else output)
        return output

    checkpoint(module, source(), use_reentrant=True).sum().backward()
    assert owner.log == [*([] if hides else ["begin"]), "asked", "end AT_OUTPUTS"]


def test_within_a_nested_forward_a_checkpoint_has_a_nested_end() -> None:
    owner = Owner()

    def module(x: torch.Tensor) -> torch.Tensor:
        output = checkpoint(asking(owner), x, use_reentrant=True)
        owner.watch(output)
        return output

    checkpoint(module, source(), use_reentrant=True).sum().backward()
    assert owner.log == ["begin", "asked", "asked", "end NESTED", "end AT_OUTPUTS"]


def test_an_end_is_awaited_from_the_request_until_the_call() -> None:
    owner = Owner()
    seen: list[tuple[bool, bool]] = []
    ends = owner.ends
    x = source()
    x.register_hook(lambda _grad: seen.append((ends.is_any_awaited(), ends.is_running_in_this_thread)))
    assert not ends.is_any_awaited()
    asking(owner)(x).sum().backward()
    (x * 1).sum().backward()
    assert seen == [(True, True), (False, False)]
    assert not ends.is_any_awaited()


def test_after_an_exception_no_end_is_awaited() -> None:
    owner = Owner()
    x = source()
    failing = x.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asking(owner)(x * 1).sum().backward()
    failing.remove()
    gc.collect()
    assert not owner.ends.is_any_awaited()
    asking(owner)(x * 1).sum().backward()
    gc.collect()
    assert owner.log == ["asked", "failure", "asked", "end AT_OUTPUTS"], "an end or a failure, not both"


def test_a_backward_past_the_outputs_came_in_elsewhere() -> None:
    owner = Owner()
    x = source()
    owner.watch(x * 2)
    asking(owner)(x).sum().backward()
    assert owner.log == ["asked", "end ELSEWHERE"]


def test_a_later_backward_through_the_outputs_is_the_main_one_in_turn() -> None:
    owner = Owner()
    output = asking(owner)(source())
    owner.watch(output)
    for _ in range(2):
        output.sum().backward(retain_graph=True)
    assert owner.log == ["begin", "asked", "end AT_OUTPUTS"] * 2


def test_an_end_that_was_forgotten_may_be_asked_for_again() -> None:
    owner = Owner()
    x = source()
    x.register_hook(lambda _grad: owner.ends.reset())
    layer = asking(owner)
    layer(layer(x * 1)).sum().backward()
    assert owner.log == ["asked", "end AT_OUTPUTS"]


def test_outputs_and_engine_do_not_keep_the_owner_alive() -> None:
    owner = Owner()
    log = owner.log
    output = source() * 2
    owner.watch(output)
    output.register_hook(lambda _grad: owners.clear())  # after it has asked
    owners = [owner]
    del owner
    output.sum().backward()
    assert log == ["begin", "asked"]
