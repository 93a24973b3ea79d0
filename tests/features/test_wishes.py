"""What users of torch's DDP have asked for, each with the number of PyTorch's issue; and bad input."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from minddp.replicas.module_change_check import FEW
from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.logs import logged
from tests.ranks import on_ranks


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
    """Not an error: a second backward may bring the rest, as here. One head's gradient comes in a second backward: twice the right one's, then the left one's."""
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


def _disagree(rank: int, name: str) -> str:
    model = Heads()
    model.register_buffer("seen", torch.zeros(3))
    first, second = SIDES[name]
    try:
        (first if rank == 0 else second)(model)
    except RuntimeError as error:
        return str(error)
    return "no error"


def ignoring(*names: str) -> Callable[[Heads], Any]:
    def wrap(model: Heads) -> Any:
        model._ddp_params_and_buffers_to_ignore = list(names)
        return minddp.DistributedDataParallel(model)

    return wrap


def with_options(**options: Any) -> Callable[[Heads], Any]:
    return lambda model: minddp.DistributedDataParallel(model, **options)


def with_another_buffer(model: Heads) -> Any:
    model.register_buffer("more", torch.zeros(2))
    return minddp.DistributedDataParallel(model)


def with_a_larger_buffer(model: Heads) -> Any:
    model.seen = torch.zeros(5)
    return minddp.DistributedDataParallel(model)


PLAIN = with_options()
SIDES: dict[str, tuple[Callable[[Heads], Any], Callable[[Heads], Any]]] = {
    "find_unused_parameters": (PLAIN, with_options(find_unused_parameters=True)),
    "static_graph": (with_options(static_graph=True), PLAIN),
    "bucket_cap_mb_list": (PLAIN, with_options(bucket_cap_mb_list=[1, 2])),
    "skip": (PLAIN, with_options(skip_all_reduce_unused_params=True)),
    "forward_sync_buffers": (PLAIN, with_options(forward_sync_buffers=False)),
    "broadcast_buffers": (with_options(broadcast_buffers=False), PLAIN),
    "ignored": (ignoring("left.weight", "left.bias"), ignoring("right.weight", "right.bias")),
    "buffers": (PLAIN, with_another_buffer),
    "larger buffer": (PLAIN, with_a_larger_buffer),
    "views": (PLAIN, with_options(gradient_as_bucket_view=True)),
    "capacity": (PLAIN, with_options(bucket_cap_mb=3)),
    "transport": (PLAIN, with_options(transport="shared_memory")),
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("find_unused_parameters", ["`find_unused_parameters` is False on rank 0, but True on rank 1"]),
        ("static_graph", ["`static_graph` is True on rank 0, but False on rank 1"]),
        ("bucket_cap_mb_list", ["first capacities", "on rank 0, but (1048576, 2097152) on rank 1"]),
        ("skip", ["`skip_all_reduce_unused_params` is False on rank 0, but True on rank 1"]),
        ("forward_sync_buffers", ["`forward_sync_buffers` is True on rank 0, but False on rank 1"]),
        ("broadcast_buffers", ["`broadcast_buffers` is False on rank 0, but True on rank 1"]),
        ("ignored", ["rank 0 reduces `right.bias`, `right.weight`, which rank 1 ignores"]),
        ("buffers", ["1 buffers and frozen params", "2 buffers and frozen params", "do not share: more"]),
        ("larger buffer", ["`seen` has sizes [3] on rank 0; it has [5] on rank 1"]),
        ("transport", ["`transport` is 'auto' on rank 0, but 'shared_memory' on rank 1"]),
        ("views", ["no error"]),
        ("capacity", ["no error"]),
    ],
)
def test_68803_102438_ranks_that_disagree_raise_an_error(ranks: Any, name: str, words: list[str]) -> None:
    for text in ranks(2).run(_disagree, name):
        for word in words:
            assert word in text


def _other_capacities(wrap: Wrap, rank: int) -> Trail:
    torch.manual_seed(0)
    ddp = wrap(Heads(), bucket_cap_mb=0.00001 if rank == 0 else 25)
    trail = []
    for step in range(3):
        ddp.zero_grad()
        ddp(random(2, 3, rank=rank, step=step)).square().sum().backward()
        trail.append(snapshot(ddp))
    return trail


def test_capacities_of_buckets_may_differ_as_in_torch(ranks: Any) -> None:
    """Rank 0's count. At three ranks another layout would have other bits."""
    ranks(3).run(play, _other_capacities)


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


def _static_begins_with_no_sync(rank: int) -> list[float]:
    """Twice the same gradients, once reduced in one go and once accumulated first."""
    sums = []
    for begins_locally in (False, True):
        ddp = wrapped(static_graph=True)
        x = random(2, 3, rank=rank)
        with ddp.no_sync() if begins_locally else nullcontext():
            ddp(x, "left").sum().backward()
        if begins_locally:
            ddp(x, "left").sum().backward()
        assert ddp.module.right.weight.grad is None
        factor = 0.5 if begins_locally else 1.0
        sums += [factor * param.grad.sum().item() for param in ddp.parameters() if param.grad is not None]
    return sums


def test_143580_a_static_graph_may_begin_with_no_sync(ranks: Any) -> None:
    one, other = ranks(2).run(_static_begins_with_no_sync)
    assert one == other
    half = len(one) // 2
    assert one[:half] == pytest.approx(one[half:])


def _static_with_unused_output(rank: int) -> list[Any]:
    ddp = wrapped(static_graph=True)
    module = ddp.module
    module.forward = lambda x: Outputs(module.left(module.body(x)), module.right(module.body(x)))
    for step in range(4):
        ddp.zero_grad()
        ddp(random(2, 3, rank=rank, step=step)).used.square().sum().backward()
    assert module.right.weight.grad is None
    return [param.grad.sum().item() for param in module.left.parameters()]


def test_79171_a_static_graph_may_have_an_output_without_use(ranks: Any) -> None:
    one, other = ranks(2).run(_static_with_unused_output)
    assert one == other


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


def _altered(rank: int, change: str, before: int) -> tuple[str, int]:
    """`before` steps, the change, and steps until it is noticed: the error, and in how many forwards."""
    ddp = wrapped(deep=10)
    module = ddp.module
    module.left.requires_grad_(True)
    for _ in range(before):
        ddp(torch.ones(1, 3)).sum().backward()
    if change == "parameter":
        module.body.scale = nn.Parameter(torch.ones(1))
    elif change == "layer":
        module.deep.append(nn.Linear(2, 2))
    elif change == "replaced":
        module.right.weight = nn.Parameter(torch.ones(2, 3))
    elif change == "harmless":
        module.deep.append(nn.ReLU())
        module.left.register_parameter("bias_too", module.left.bias)
        module.again = module.body
    for forwards in range(1, 20):
        try:
            ddp(torch.ones(1, 3)).sum().backward()
        except RuntimeError as error:
            return str(error), forwards
    return "no error", 0


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("parameter", "`body.scale` did not exist"),
        ("layer", "`deep.10.weight` did not exist, `deep.10.bias` did not exist"),
        ("replaced", "`right.weight` did not exist"),
        ("harmless", "no error"),
    ],
)
def test_parameters_that_are_added_are_noticed(ranks: Any, change: str, words: str, before: int) -> None:
    num_submodules = 5 + 10
    for text, forwards in ranks(2).run(_altered, change, before):
        assert words in text
        assert forwards <= (1 if before == 0 else -(-num_submodules // FEW))


def _frozen(rank: int, finds_unused: bool) -> tuple[str, str]:
    ddp = wrapped(find_unused_parameters=finds_unused)
    ddp(torch.ones(1, 3)).sum().backward()
    ddp.module.left.requires_grad_(False)
    with logged() as texts:
        ddp(torch.ones(1, 3)).sum().backward()
    try:
        ddp(torch.ones(1, 3))
    except RuntimeError as error:
        return str(error), "".join(text for text in texts if "produced no gradient" in text)
    return "no error", ""


def test_a_layer_that_is_frozen_is_named_in_backward(ranks: Any) -> None:
    for error, warning in ranks(2).run(_frozen, False):
        for text in (error, warning):
            assert "no longer do: left.weight, left.bias" in text


def test_with_find_unused_parameters_layers_may_be_frozen(ranks: Any) -> None:
    assert ranks(2).run(_frozen, True) == [("no error", "")] * 2


@on_ranks(2)
def test_copies_watch_their_own_module(rank: int) -> None:
    """A pickled or copied wrapper watches its own module."""
    import copy

    ddp = copy.deepcopy(wrapped())
    ddp(torch.ones(1, 3)).sum().backward()
    ddp.module.body.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"`body\.extra` did not exist"):
        ddp(torch.ones(1, 3))
