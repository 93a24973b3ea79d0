"""What users of torch's DDP have asked for, each with the number of PyTorch's issue; and bad input."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.logs import logged, must_log
from tests.ranks import of_all_ranks, on_ranks


class Heads(nn.Module):
    """A body with two heads, either of which may be left out; `deep` are many layers without use."""

    def __init__(self, deep: int = 0):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)
        self.deep = nn.ModuleList(nn.Identity() for _ in range(deep))

    def forward(self, x: torch.Tensor, use: str = "both") -> torch.Tensor:
        y = self.body(x)
        heads = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[use]
        return torch.stack([head(y) for head in heads]).sum(0)


def wrapped(*args: Any, deep: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(Heads(deep), *args, **options)


# ------------------------------------------------------------------ an unfinished reduction warns at once (68297)


@on_ranks(2)
def test_68297_a_backward_that_ends_unfinished_warns_once(rank: int) -> None:
    """Not an error: a second backward may bring the rest, as here twice the right head's, then the left one's."""
    ddp = wrapped()
    body, heads = ddp.module.body, [ddp.module.left, ddp.module.right]
    ddp.module.forward = lambda x, first: (heads[first](body(x)), heads[1 - first](body(x).detach()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with logged() as texts:
        for first in (0, 0, 1):
            for output in ddp(torch.ones(1, 3), first):
                output.sum().backward()
            optimizer.step()
    warned = [text for text in texts if "produced no gradient" in text]
    assert len(warned) == 2
    assert f"rank {rank} for: right.weight, right.bias." in warned[0]
    assert f"rank {rank} for: left.weight, left.bias." in warned[1]


# --------------------------------------------------------------- ranks that disagree raise an error (68803, 102438)


@on_ranks(2)
@pytest.mark.parametrize(
    ("on_rank_1", "words"),
    [
        ({"find_unused_parameters": True}, "`find_unused_parameters` is False on rank 0, but True on rank 1"),
        ({"forward_sync_buffers": False}, "`forward_sync_buffers` is True on rank 0, but False on rank 1"),
        ({"broadcast_buffers": False}, "`broadcast_buffers` is True on rank 0, but False on rank 1"),
        ({"transport": "shared_memory"}, "`transport` is 'auto' on rank 0, but 'shared_memory' on rank 1"),
        ({"buffer": 5}, r"`seen` has sizes \[3\] on rank 0; it has \[5\] on rank 1"),
        ({"ignored": "right"}, "rank 0 reduces `right.bias`, `right.weight`, which rank 1 ignores"),
    ],
)
def test_68803_102438_ranks_that_disagree_raise_an_error(rank: int, on_rank_1: dict[str, Any], words: str) -> None:
    """More such differences: `tests/replicas/test_agreement.py`."""
    options, model = (on_rank_1.copy() if rank == 1 else {}), Heads()
    model.register_buffer("seen", torch.zeros(options.pop("buffer", 3)))
    if "ignored" in on_rank_1:
        ignored = options.pop("ignored", "left")
        model._ddp_params_and_buffers_to_ignore = [f"{ignored}.weight", f"{ignored}.bias"]
    with pytest.raises(RuntimeError, match=words):
        minddp.DistributedDataParallel(model, **options)


def _other_capacities(wrap: Wrap, rank: int) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(Heads(), bucket_cap_mb=0.00001 if rank == 0 else 25)
    trail = []
    for step in range(3):
        ddp.zero_grad()
        ddp(random(2, 3, rank=rank, step=step)).square().sum().backward()
        trail.append(snapshot(ddp))
    return trail


@on_ranks(3)
def test_capacities_of_buckets_may_differ_as_in_torch(rank: int) -> None:
    """Rank 0's count. At three ranks another layout would have other bits."""
    play(rank, _other_capacities)


# ------------------------------------------------------------------ the first bucket (121640), and other options


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"first_bucket_cap_mb": 1e-5, "bucket_cap_mb": 0.002}, [64, 2112, 2176, 2176]),
        ({"first_bucket_cap_mb": 0.002, "bucket_cap_mb": 1}, [2176, 4352]),
        ({"bucket_cap_mb": 0.002}, [2176] * 3),
    ],
)
def test_121640_the_first_bucket_has_a_capacity_of_its_own(
    rank: int, options: dict[str, Any], sizes: list[int]
) -> None:
    ddp = minddp.DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1, 16)).sum().backward()
    got = [bucket.nbytes for bucket in ddp.plan.buckets]
    assert sum(got) == 6 * 4 * (16 * 16 + 16)
    assert got == sizes


# ------------------------------------------------------------------ no_sync with the options (69031, 143580, 79171)


@dataclass
class Outputs:
    used: torch.Tensor
    unused: torch.Tensor


def _accumulate(wrap: Wrap, rank: int, options: dict[str, Any]) -> Trail:
    """Each micro-batch uses another head; the last one, which is reduced, uses the left one only."""
    torch.manual_seed(0)
    ddp = wrap(Heads(), **options)
    static = options.get("static_graph", False)
    trail = []
    for step in range(3):
        if static and step == 0:  # with which torch cannot begin under no_sync
            ddp(random(2, 3, rank=rank, step=99)).sum().backward()
        for batch, use in enumerate(["right", "both", "left"]):
            with ddp.no_sync() if batch < 2 else nullcontext():
                ddp(
                    random(2, 3, rank=rank, step=10 * step + batch), "both" if static else use
                ).square().sum().backward()
        trail.append(snapshot(ddp))
        ddp.zero_grad(set_to_none=step == 0)
    return trail


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph"])
def test_69031_accumulated_gradients_of_unused_parameters_are_kept(ranks: Any, name: str, views: bool) -> None:
    one, other = ranks(2).run(play, _accumulate, {name: True, "gradient_as_bucket_view": views})
    for here, there in zip(one, other, strict=True):
        assert here["module.right.weight.grad"].abs().sum() > 0
        assert torch.equal(here["module.right.weight.grad"], there["module.right.weight.grad"])


@on_ranks(2)
def test_143580_a_static_graph_may_begin_with_no_sync(rank: int) -> None:
    """Twice the same gradients, once reduced in one go and once accumulated first."""
    x, sums = random(2, 3, rank=rank), []
    for times in (1, 2):
        ddp = wrapped(static_graph=True)
        if times == 2:
            with ddp.no_sync():
                ddp(x, "left").sum().backward()
        ddp(x, "left").sum().backward()
        assert ddp.module.right.weight.grad is None
        sums.append([param.grad.sum().item() / times for param in ddp.parameters() if param.grad is not None])
    assert sums[0] == pytest.approx(sums[1])
    assert of_all_ranks(sums) == [sums] * 2


@on_ranks(2)
def test_79171_a_static_graph_may_have_an_output_without_use(rank: int) -> None:
    ddp = wrapped(static_graph=True)
    module = ddp.module
    module.forward = lambda x: Outputs(module.left(module.body(x)), module.right(module.body(x)))
    for step in range(4):
        ddp.zero_grad()
        ddp(random(2, 3, rank=rank, step=step)).used.square().sum().backward()
    assert module.right.weight.grad is None
    sums = [param.grad.sum().item() for param in module.left.parameters()]
    assert of_all_ranks(sums) == [sums] * 2


# ------------------------------------------------------------------ 30718 and 74115


@on_ranks(3)
@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("source", [0, 2])
def test_30718_parameters_and_buffers_are_broadcast_on_demand(rank: int, source: int, buffers: bool) -> None:
    model = Heads()
    model.register_buffer("seen", torch.zeros(1))
    model.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    model.own = nn.Parameter(torch.zeros(1), requires_grad=False)
    model._ddp_params_and_buffers_to_ignore = ["own"]
    ddp = minddp.DistributedDataParallel(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float(rank))
    ddp.synchronize(source, buffers=buffers)
    got = [tensor.flatten()[0].item() for tensor in (model.body.weight, model.frozen, model.seen, model.own)]
    assert got == [source, source, source if buffers else rank, rank]


@on_ranks(2)
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_74115_outputs_are_the_objects_that_the_module_returned(rank: int, options: dict[str, Any]) -> None:
    ddp = wrapped(**options)
    made: list[Any] = []

    def forward(x: torch.Tensor) -> dict[str, Any]:
        y = ddp.module.left(ddp.module.body(x))
        made.append({"y": y, "same": [y, (y.detach(), Outputs(y, y))]})
        return made[-1]

    ddp.module.forward = forward
    for _ in range(3):
        output = ddp(torch.ones(2, 3))
        assert output is made[-1]
        assert output["y"] is output["same"][0] is output["same"][1][1].used
        output["y"].mul_(2.0)  # which a clone would allow, and a view not
        output["y"].sum().backward()


# ------------------------------------------------------------------ modules that change after wrapping


@on_ranks(2)
@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("before", [0, 3])
def test_a_parameter_that_is_added_is_noticed(rank: int, before: int, is_copy: bool) -> None:
    """Also by a copied wrapper, in its own module. Other changes: `tests/replicas/test_module_change_check.py`."""
    ddp = wrapped(deep=10)
    ddp = copy.deepcopy(ddp) if is_copy else ddp
    for _ in range(before):
        ddp(torch.ones(1, 3)).sum().backward()
    ddp.module.body.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"`body\.scale` did not exist"):
        ddp(torch.ones(1, 3))


@on_ranks(2)
def test_functional_gradients_of_the_wrapper(rank: int) -> None:
    ddp, x = wrapped(static_graph=True), torch.ones(1, 3)
    params = dict(ddp.named_parameters())
    functional = torch.func.grad(lambda own: torch.func.functional_call(ddp, own, (x,)).square().sum())(params)
    ddp(x).square().sum().backward()
    assert all(torch.equal(grad, params[name].grad) for name, grad in functional.items())


@on_ranks(2)
def test_a_wrapper_may_share_its_parameters_with_another(rank: int) -> None:
    """As when a module is wrapped again while the old wrapper lives."""
    with logged() as texts:
        ddp = wrapped()
        for wrapper in (ddp, minddp.DistributedDataParallel(ddp.module), ddp):
            for _ in range(2):
                wrapper(torch.ones(1, 3)).sum().backward()
    assert not [text for text in texts if "not averaged" in text]


@on_ranks(2)
def test_a_new_head_on_a_frozen_module_is_noticed(rank: int) -> None:
    ddp = wrapped(deep=30)
    for _ in range(4):
        ddp(torch.ones(1, 3)).sum().backward()
    ddp.module.requires_grad_(False)
    ddp.module.deep.append(nn.Linear(3, 3))
    ddp.module.forward = ddp.module.deep[-1].forward
    with pytest.raises(RuntimeError, match=r"`deep\.30\.weight` did not exist"):
        ddp(torch.ones(1, 3))


@on_ranks(2)
def test_a_layer_that_is_frozen_is_named_in_backward(rank: int) -> None:
    ddp = wrapped()
    ddp(torch.ones(1, 3)).sum().backward()
    ddp.module.left.requires_grad_(False)
    with must_log(r"(?s)produced no gradient.*no longer do: left\.weight, left\.bias"):
        ddp(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"no longer do: left\.weight, left\.bias"):
        ddp(torch.ones(1, 3))


@on_ranks(2)
def test_with_find_unused_parameters_layers_may_be_frozen(rank: int) -> None:
    ddp = wrapped(find_unused_parameters=True)
    with logged() as texts:
        for is_frozen in (False, True, True):
            ddp.module.left.requires_grad_(not is_frozen)
            ddp(torch.ones(1, 3)).sum().backward()
    assert not [text for text in texts if "produced no gradient" in text]
