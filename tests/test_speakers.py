"""One hook per run: who speaks for whom, and what happens when a speaker is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minddp.core.events import EventKind
from tests.fakes import FakeDDP

X = torch.ones(2, 4)


class NoGradient(torch.autograd.Function):
    """Lets nothing through: the gradient behind it is undefined."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


class Chain(nn.Module):
    """Three layers, whose order, use and gradients can be changed between steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order: list[int | tuple[int, ...]] = [0, 1, 2]
        self.undefined: int | None = None
        self.checkpoints = False
        self.wraps: Callable[[torch.Tensor], Any] = lambda output: output

    def forward(self, x: torch.Tensor) -> Any:
        for index in self.order:
            chosen = [self.layers[each] for each in (index if isinstance(index, tuple) else (index,))]
            layer = nn.Sequential(*chosen) if len(chosen) > 1 else chosen[0]
            if index == self.undefined:
                x = nn.functional.linear(x, NoGradient.apply(layer.weight), layer.bias)
            elif self.checkpoints and index:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
            x = torch.tanh(x)
        return self.wraps(x)


def loss_of(output: Any) -> torch.Tensor:
    return getattr(output, "hidden", output).sum()


def wrapped(*, all_speak: bool = False, **changed: Any) -> FakeDDP:
    """Nobody watches it; with `all_speak` every parameter keeps its hook."""
    ddp = FakeDDP(Chain(), **changed)
    ddp.reducer.unwatch(ddp.events.append)
    ddp.reducer._speakers.may_be_elected = not all_speak
    return ddp


def step(ddp: FakeDDP, *, sync: bool = True, to_none: bool = True) -> list[torch.Tensor | None]:
    """One with an update, so that a wrong gradient shows ever after."""
    loss_of(ddp(X, sync=sync)).backward()
    grads = [None if param.grad is None else param.grad.clone() for param in ddp.module.parameters()]
    if sync:
        with torch.no_grad():
            for param in ddp.module.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
        ddp.module.zero_grad(set_to_none=to_none)
    return grads


def num_hooks(ddp: FakeDDP) -> int:
    return len(ddp.reducer._hooks.handles)


def elected() -> FakeDDP:
    ddp = wrapped()
    for _ in range(2):
        assert num_hooks(ddp) == 6
        step(ddp)
    assert num_hooks(ddp) == 1
    return ddp


def same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def test_after_a_backward_under_the_final_plan_one_hook_is_left() -> None:
    ddp = elected()
    [speaker] = ddp.reducer._hooks.handles
    assert ddp.reducer.names[speaker].startswith("layers.0")  # backward comes to it last
    other = wrapped(all_speak=True)
    for _ in range(2):
        step(other)
    for _ in range(3):
        assert same(step(ddp), step(other))
    assert (num_hooks(ddp), num_hooks(other)) == (1, 6)


def test_each_run_has_a_speaker() -> None:
    ddp = wrapped(bucket_cap_mb=0)
    for _ in range(2):
        step(ddp)
    assert num_hooks(ddp) == 6
    assert len(ddp.reducer.buckets) == 6


def _reorders(ddp: FakeDDP, at: int) -> None:
    ddp.module.order = [1, 2, 0] if at == 3 else [0, 1, 2]


def _has_an_undefined_gradient(ddp: FakeDDP, at: int) -> None:
    ddp.module.undefined = 0 if at == 3 else None


def _keeps_gradients(ddp: FakeDDP, at: int) -> None:
    if at == 3:
        step(ddp, sync=False)


def _zeroes_instead(ddp: FakeDDP, at: int) -> None:
    if at >= 3:
        for param in ddp.module.parameters():
            param.grad = torch.zeros_like(param)


def _hides_its_output(ddp: FakeDDP, at: int) -> None:
    ddp.module.wraps = (lambda output: SimpleNamespace(hidden=output)) if at == 3 else (lambda output: output)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "change", [_reorders, _has_an_undefined_gradient, _keeps_gradients, _zeroes_instead, _hides_its_output]
)
def test_where_a_speaker_would_be_wrong_all_hooks_come_back(
    change: Callable[[FakeDDP, int], None], static: bool
) -> None:
    ddp, other = wrapped(static_graph=static), wrapped(static_graph=static, all_speak=True)
    for at in range(6):
        for each in (ddp, other):
            change(each, at)
        assert (num_hooks(ddp) == 1) == (at in ((3,) if static else (2, 3))), at
        assert same(step(ddp), step(other)), at
        assert ddp.transport.calls == other.transport.calls


def test_gradients_that_exist_at_first_let_nobody_be_elected() -> None:
    ddp = wrapped()
    for _ in range(4):
        step(ddp, to_none=False)
    assert num_hooks(ddp) == 6


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_who_has_to_know_more_keeps_all_hooks() -> None:
    ddp = wrapped(find_unused_parameters=True)
    for _ in range(4):
        step(ddp)
    assert num_hooks(ddp) == 6


def test_a_static_graph_elects_when_it_is_settled() -> None:
    ddp, other = wrapped(static_graph=True), wrapped(static_graph=True, all_speak=True)
    for at in range(6):
        assert num_hooks(ddp) == (1 if at >= 3 else 6), at
        assert same(step(ddp), step(other)), at
    assert ddp.transport.calls == other.transport.calls


def _leaves_one_out(module: Chain) -> None:
    module.order = [0, 2]


def _uses_one_twice(module: Chain) -> None:
    """In two nested backwards. In the first of them, its gradient comes when nobody has to be watched any more."""
    module.order, module.checkpoints = [0, 1, (1, 2)], True


@pytest.mark.parametrize("change", [_leaves_one_out, _uses_one_twice])
def test_a_static_graph_that_does_not_use_each_parameter_once_keeps_all_hooks(
    change: Callable[[Chain], None],
) -> None:
    ddp, alone = wrapped(static_graph=True, bucket_cap_mb=0), Chain()  # all ranks do the same, so it is the mean
    change(ddp.module)
    change(alone)
    for at in range(5):
        alone.zero_grad()
        loss_of(alone(X)).backward()
        grads = step(ddp)
        assert same(grads, [param.grad for param in alone.parameters()]), at
        with torch.no_grad():
            for param in alone.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
    assert num_hooks(ddp) == 6


def test_nested_backwards_let_nobody_be_elected() -> None:
    ddp = wrapped()
    ddp.module.checkpoints = True
    for _ in range(4):
        step(ddp)
    assert num_hooks(ddp) == 6


def test_runs_that_were_ready_as_a_whole_are_not_packed_again() -> None:
    """One speaker is wrong, and those who had spoken before were right: their buckets are under way."""
    layer_mb = (4 * 4 + 4) * 4 / 2**20
    both = wrapped(bucket_cap_mb=layer_mb), wrapped(bucket_cap_mb=layer_mb, all_speak=True)
    for each in both:
        each.reducer.watch(each.events.append)
    ddp, other = both
    for at in range(6):
        assert num_hooks(ddp) == (3 if at in (2, 3) else 6), at
        for each in both:
            each.module.undefined = 0 if at == 3 else None
        assert same(step(ddp), step(other)), at
        assert len(ddp.told(EventKind.PACK_BEGIN)) == len(ddp.reducer.bucketing.members), at
    assert ddp.transport.calls == other.transport.calls


TOLD = (EventKind.PARAM_READY, EventKind.PACK_BEGIN, EventKind.GRADIENT_KEPT)


def test_a_watcher_hears_of_each_parameter_in_the_same_order() -> None:
    ddp, other = elected(), wrapped(all_speak=True)
    for _ in range(2):
        step(other)
    for each in (ddp, other):
        each.reducer.watch(each.events.append)
        step(each)
    heard = ddp.told(*TOLD)
    assert heard == other.told(*TOLD)
    assert len(heard) == 6 + 1
    assert num_hooks(ddp) == 1
    ddp.reducer.unwatch(ddp.events.append)
    step(ddp)
    assert ddp.told() == []
    assert not any(param._post_accumulate_grad_hooks for param in ddp.module.parameters())


def test_who_watches_from_the_beginning_hears_the_same() -> None:
    ddp, other = wrapped(), wrapped(all_speak=True)
    for each in (ddp, other):
        each.reducer.watch(each.events.append)
        for _ in range(4):
            step(each)
    assert ddp.told(*TOLD) == other.told(*TOLD)
    assert (num_hooks(ddp), num_hooks(other)) == (1, 6)


def test_what_stays_local_is_told_as_such() -> None:
    ddp = elected()
    ddp.reducer.watch(ddp.events.append)
    output = ddp(X, sync=False)
    ddp.reducer.keep_local()
    loss_of(output).backward()
    assert [text.split(":")[0] for text in ddp.told(*TOLD)] == ["gradient kept"] * 6


def test_a_second_backward_through_one_graph_is_no_news_of_gradients_to_reduce() -> None:
    ddp = elected()
    ddp.reducer.watch(ddp.events.append)
    loss = loss_of(ddp(X))
    loss.backward(retain_graph=True)
    ddp.told()
    loss.backward()
    assert not any("parameter ready" in text for text in ddp.told())


def test_a_dropped_wrapper_leaves_no_notes() -> None:
    ddp = elected()
    module = ddp.module
    ddp.reducer.watch(lambda event: None)
    assert all(param._post_accumulate_grad_hooks for param in module.parameters())
    del ddp
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


def test_what_a_backward_leaves_out_is_named_and_may_still_come() -> None:
    ddp = elected()
    ddp.module.order = [2]
    output = ddp(X)
    with pytest.warns(UserWarning, match=r"no gradient on rank 0 for: layers\.0\.weight, .*, layers\.1\.bias\. "):
        loss_of(output).backward()
    assert num_hooks(ddp) == 6
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(X)
    ddp.module.order = [0, 1]
    loss_of(ddp.module(X)).backward()
    step(ddp)


def test_removed_hooks_stay_off() -> None:
    ddp = elected()
    ddp.reducer.remove_hooks()
    ddp.reducer.watch(lambda event: None)
    assert num_hooks(ddp) == 0


def test_a_rank_that_is_asked_in_between_names_only_what_has_not_come() -> None:
    ddp, said = elected(), []
    first = ddp.module.layers[0].weight
    first.register_hook(lambda grad: said.append(ddp.reducer.progress().missing))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(ddp(X)).backward()
    [names] = said[0].values() if said[0] else [()]
    assert "layers.2.weight" not in names


@pytest.mark.parametrize("changed", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_autograd_grad_after_a_forward_accumulates_nothing(changed: dict[str, bool]) -> None:
    """The engine then refuses to say whether it will run the accumulators: it will not."""
    ddp = wrapped(**changed)
    params = list(ddp.module.parameters())
    for at in range(5):
        grads = torch.autograd.grad(loss_of(ddp(X)), params)
        assert all(param.grad is None for param in params)
        assert same(step(ddp), list(grads)), at


def test_a_parameter_may_be_frozen_while_somebody_watches() -> None:
    ddp = elected()
    ddp.module.layers[0].weight.requires_grad_(False)
    ddp.reducer.watch(ddp.events.append)
    ddp.reducer.unwatch(ddp.events.append)
