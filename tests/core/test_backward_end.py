"""Which backward is over, and was it nested in another one. See [Note: which backward ends]."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minddp.core.backward_end import BackwardEnd
from tests.modules import Hidden


class Owner:
    """Notes what a `BackwardEnd` reports. `asks_on_begin`: the end is requested where a gradient enters."""

    def __init__(self, *, asks_on_begin: bool = False):
        self.log: list[str] = []
        self.asks_on_begin = asks_on_begin
        self.backward_end = BackwardEnd(self.on_end, self.on_begin)

    def on_begin(self, is_rest: bool) -> None:
        self.log.append("begin at another output" if is_rest else "begin")
        if self.asks_on_begin:
            self.ask()

    def on_end(self, is_nested: bool) -> None:
        self.log.append("nested end" if is_nested else "end")

    def ask(self, *_grad: torch.Tensor) -> None:
        if self.backward_end.await_end():
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


def test_the_end_is_called_once_however_often_it_is_requested() -> None:
    owner = Owner()
    layer = asking(owner)
    layer(layer(source())).sum().backward()
    assert owner.log == ["asked", "end"]


def test_each_backward_has_an_end_of_its_own() -> None:
    owner = Owner()
    for _ in range(2):
        asking(owner)(source()).sum().backward()
    assert owner.log == ["asked", "end"] * 2


def test_an_end_is_awaited_until_it_has_been_called() -> None:
    """Hooks that fire within, in a further backward, belong to the one that ends. Also if it raises."""

    class Ending(Owner):
        def on_end(self, is_nested: bool) -> None:
            self.log.append(f"awaited: {self.backward_end.is_awaited}")
            raise KeyError("in the end")

    owner = Ending()
    with pytest.raises(KeyError, match="in the end"):
        asking(owner)(source()).sum().backward()
    assert owner.log == ["asked", "awaited: True"]
    assert not owner.backward_end.is_awaited


def test_without_a_request_no_end_is_called() -> None:
    owner = Owner()
    output = source() * 2
    owner.backward_end.watch(output)
    output.sum().backward()
    assert owner.log == ["begin"]


def test_the_end_of_a_nested_backward_is_reported_as_nested() -> None:
    owner = Owner()
    layer = asking(owner)
    layer(checkpoint(layer, source(), use_reentrant=True)).sum().backward()
    assert owner.log == ["asked", "asked", "nested end", "end"]


@pytest.mark.parametrize("hides", [False, True])
def test_within_a_nested_forward_the_end_of_its_backward_is_the_end(hides: bool) -> None:
    """The whole module is in a reentrant checkpoint: its forward runs again in a backward."""
    owner = Owner()

    def module(x: torch.Tensor) -> torch.Tensor:
        output = asking(owner)(x)
        owner.backward_end.watch(Hidden(output) if hides else output)
        return output

    checkpoint(module, source(), use_reentrant=True).sum().backward()
    assert owner.log == [*([] if hides else ["begin"]), "asked", "end"]


def test_within_a_nested_forward_a_checkpoint_has_a_nested_end() -> None:
    owner = Owner(asks_on_begin=True)

    def module(x: torch.Tensor) -> torch.Tensor:
        output = checkpoint(asking(owner), x, use_reentrant=True)
        owner.backward_end.watch(output)
        return output

    checkpoint(module, source(), use_reentrant=True).sum().backward()
    assert owner.log == ["begin", "asked", "asked", "nested end", "end"]


def test_the_end_of_a_backward_is_called_or_its_failure() -> None:
    class Failing(Owner):
        def __init__(self) -> None:
            super().__init__()
            self.backward_end = BackwardEnd(self.on_end, on_failure=self.on_failure)

        def on_failure(self) -> None:
            self.log.append("failure")

    owner = Failing()
    asking(owner)(source()).sum().backward()
    gc.collect()
    assert owner.log == ["asked", "end"]
    x = source()
    x.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asking(owner)(x * 1).sum().backward()
    assert owner.log == ["asked", "end", "asked", "failure"]


def test_the_beginning_is_reported_first() -> None:
    owner = Owner(asks_on_begin=True)
    output = asking(owner)(source())
    owner.backward_end.watch({"out": [output]})
    output.sum().backward()
    assert owner.log == ["begin", "asked", "end"]


def test_an_end_is_awaited_from_the_request_until_the_call() -> None:
    owner = Owner()
    seen: list[tuple[bool, bool]] = []
    end = owner.backward_end
    x = source()
    x.register_hook(lambda _grad: seen.append((end.is_awaited, end.is_awaited_here)))
    assert not end.is_awaited
    asking(owner)(x).sum().backward()
    (x * 1).sum().backward()
    assert seen == [(True, True), (False, False)]
    assert not end.is_awaited


def test_after_an_exception_the_end_is_awaited_until_it_is_forgotten() -> None:
    owner = Owner()
    x = source()
    failing = x.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asking(owner)(x * 1).sum().backward()
    failing.remove()
    assert owner.backward_end.is_awaited
    seen: list[bool] = []
    x.register_hook(lambda _grad: seen.append(owner.backward_end.is_awaited_here))
    (x * 1).sum().backward()
    assert seen == [False], "it was another backward"
    owner.backward_end.reset()
    assert not owner.backward_end.is_awaited
    asking(owner)(x * 1).sum().backward()
    assert owner.log == ["asked", "asked", "end"]


def test_outputs_and_engine_do_not_keep_the_owner_alive() -> None:
    owner = Owner(asks_on_begin=True)
    log = owner.log
    output = source() * 2
    owner.backward_end.watch(output)
    output.register_hook(lambda _grad: owners.clear())  # after it has asked
    owners = [owner]
    del owner
    output.sum().backward()
    assert log == ["begin", "asked"]


def test_futures_are_waited_for_once() -> None:
    future: torch.futures.Future = torch.futures.Future()
    end = Owner().backward_end
    end.wait_for_futures()
    end.futures.append(future)
    future.set_result(None)
    end.wait_for_futures()
    assert end.futures == []
    failed: torch.futures.Future = torch.futures.Future()
    failed.set_exception(KeyError("hook"))
    end.futures.append(failed)
    with pytest.raises(KeyError):
        end.wait_for_futures()
    assert end.futures == []
