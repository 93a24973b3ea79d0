"""The interface to the autograd engine: when hooks fire, what the engine knows, when a backward is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minddp.core import autograd
from tests.modules import WithoutGradient


class Recorder:
    """Notes which parameter's hook fired, and what its gradient was then."""

    def __init__(self) -> None:
        self.params = two_params()
        self.fired: list[int] = []
        self.grads: list[torch.Tensor | None] = []
        self.hooks = autograd.GradientHooks(self.params, self.on_grad_accumulated)

    def on_grad_accumulated(self, param: int, *_from_engine: object) -> None:
        self.fired.append(param)
        grad = self.params[param].grad
        self.grads.append(None if grad is None else grad.clone())


def two_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.tensor(3.0))]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.hooks.remove()


def test_a_hook_fires_once_after_the_gradient_has_its_value(recorder: Recorder) -> None:
    params = recorder.params
    (params[0] * params[0] * params[1]).backward()
    assert sorted(recorder.fired) == [0, 1]
    assert recorder.grads[recorder.fired.index(0)] == 12.0  # both uses are in
    params[0].pow(2).backward()
    assert recorder.fired[2:] == [0]
    assert recorder.grads[2] == 16.0  # and what was there before


def test_a_hook_fires_for_a_gradient_that_is_undefined(recorder: Recorder) -> None:
    params = recorder.params
    WithoutGradient.apply(params[0] * 1, params[1]).backward()
    assert sorted(recorder.fired) == [0, 1]
    assert params[1].grad is None


def test_removed_hooks_do_not_fire_and_may_be_removed_again(recorder: Recorder) -> None:
    params, hooks = recorder.params, recorder.hooks
    hooks.remove()
    hooks.remove()
    (params[0] * params[1]).backward()
    assert recorder.fired == []


@pytest.mark.parametrize(
    ("run", "reached"),
    [
        (lambda product, params: product.backward(), [True, True]),
        (lambda product, params: torch.autograd.grad(product, params[:1]), [False, False]),
        (lambda product, params: product.backward(inputs=params[1:]), [False, True]),
    ],
    ids=["all", "asked for gradients", "of some"],
)
def test_the_engine_knows_which_accumulators_it_will_run(run: Any, reached: list[bool], recorder: Recorder) -> None:
    answers: list[bool] = []
    product = recorder.params[0] * recorder.params[1]
    product.register_hook(lambda _: answers.extend(map(autograd.will_be_reached, recorder.hooks.accumulators)))
    run(product, recorder.params)
    assert answers == reached
    with pytest.raises(RuntimeError):  # outside of a backward
        autograd.will_be_reached(recorder.hooks.accumulators[0])


def test_the_beginning_is_reported_for_each_output() -> None:
    weight = torch.nn.Parameter(torch.tensor(2.0))
    began: list[int | None] = []
    outputs = {"a": [weight * 1, weight.detach()], "b": (weight * 3,)}

    class Listener:
        def note(self, _unreached: set[int], place: int | None) -> None:
            began.append(place)

    listener = Listener()
    autograd.call_when_gradient_enters(outputs, listener.note)
    outputs["b"][0].backward(retain_graph=True)
    outputs["b"][0].backward(retain_graph=True)
    outputs["a"][0].backward(retain_graph=True)
    assert began == [1, None, 0]
    del listener  # only referenced weakly: the outputs may outlive it
    outputs["b"][0].backward()
    assert began == [1, None, 0]


def test_tensors_are_found_within_containers_and_dataclasses() -> None:
    @dataclass
    class Output:
        loss: torch.Tensor
        rest: list[Any]

    a, b, c = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    found = list(autograd.tensors_in([Output(a, [b, "text"]), {"c": (c, None)}, Output, 5]))
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c)]


def test_hooks_move_to_the_accumulators_of_another_dtype(recorder: Recorder) -> None:
    params, hooks = recorder.params, recorder.hooks
    for param in params:
        param.data = param.data.double()
    (params[0] * params[1]).backward()
    assert recorder.fired == []
    for _ in range(2):  # once more, where nothing has changed
        recorder.fired.clear()
        hooks.renew()
        (params[0] * params[1]).backward()
        assert sorted(recorder.fired) == [0, 1]


def test_hooks_of_frozen_parameters_stay_where_they_are(recorder: Recorder) -> None:
    params, hooks = recorder.params, recorder.hooks
    params[1].requires_grad_(False)
    params[0].data = params[0].data.double()
    hooks.renew()
    (params[0] * params[1]).backward()
    params[1].requires_grad_(True)
    (params[0] * params[1]).backward()
    assert recorder.fired == [0, 1, 0] or recorder.fired == [0, 0, 1]


def test_an_error_in_a_hook_is_reported_and_raised(recorder: Recorder) -> None:
    """Its handler may be exchanged while it is there."""
    reported: list[Exception] = []

    def fail(param: int) -> None:
        raise OSError(f"no room for {param}")

    recorder.hooks.handler, recorder.hooks.on_error = fail, reported.append
    with pytest.raises(OSError, match="no room for 1"):
        (recorder.params[1] * 1).backward()
    assert list(map(str, reported)) == ["no room for 1"]
    assert recorder.fired == []


def test_outputs_without_a_graph_report_no_beginning(recorder: Recorder) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    assert autograd.call_when_gradient_enters({"a": weight * 1}, recorder.on_grad_accumulated)
    assert not autograd.call_when_gradient_enters([torch.ones(1), weight, "text"], recorder.on_grad_accumulated)


@pytest.mark.parametrize(("other_device", "waits"), [("cpu", False), ("meta", True)])
def test_hooks_of_several_devices_fire_one_by_one(other_device: str, waits: bool) -> None:
    """The engine has a thread for each device."""
    params = [torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1, device=other_device))]
    free: list[bool] = []

    def handler(_param: int) -> None:
        other = threading.Thread(target=lambda: free.append(hooks._lock.acquire(timeout=0.05)))
        other.start()
        other.join()

    hooks = autograd.GradientHooks(params, handler)
    (params[0] * 1).backward()
    assert free == [not waits]
    hooks.remove()
