"""What can be wrapped and where it may lie, by torch's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minddp.replicas.placement import Placement, check_module, resolve_group, sparse_parameters

CPU = torch.device("cpu")


def on_meta(module: nn.Module) -> nn.Module:
    """As if on a GPU, as far as these tests need it."""
    return module.to("meta")


def test_a_module_on_the_cpu_is_left_alone() -> None:
    placement = Placement.checked(nn.Linear(2, 2), (), None, None)
    assert placement == Placement(CPU, None, None)
    inputs, kwargs = object(), {"x": object()}
    assert placement.move(inputs, kwargs) == (inputs, kwargs)


def test_several_devices_of_one_type_are_allowed() -> None:
    """The device that counts for small messages is that of the first parameter, as in torch."""
    with FakeTensorMode():
        module = nn.ParameterList(torch.empty(2, device=f"cuda:{index}") for index in (1, 0))
        placement = Placement.checked(module, (), None, None)
    assert placement == Placement(torch.device("cuda:1"), None, None)
    inputs, kwargs = (torch.ones(1),), {"mask": None}
    assert placement.move(inputs, kwargs) == (inputs, kwargs), "the module itself moves things between its devices"


@pytest.mark.parametrize(("ids", "output"), [([0], None), (None, 1)])
def test_on_the_cpu_no_device_can_be_named(ids: list[int] | None, output: int | None) -> None:
    with pytest.raises(ValueError, match="only work with single-device GPU modules"):
        Placement.checked(nn.Linear(2, 2), (), ids, output)


def test_one_process_has_one_device() -> None:
    with pytest.raises(ValueError, match="can only be None or contain a single element"):
        Placement.checked(nn.Linear(2, 2), (), [0, 1], None)


def test_parameters_lie_on_one_kind_of_device_unless_ignored() -> None:
    module = nn.Sequential(nn.Linear(2, 2), on_meta(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="same type of devices"):
        Placement.checked(module, (), None, None)
    assert Placement.checked(module, ("1.weight", "1.bias"), None, None).device == CPU


@pytest.mark.parametrize(
    ("ids", "output", "expected"),
    [(None, None, (None, None)), ([0], None, ([0], 0)), ([torch.device("cuda:1")], 0, ([1], 0))],
)
def test_elsewhere_a_device_may_be_named(ids: Any, output: int | None, expected: tuple[Any, Any]) -> None:
    placement = Placement.checked(on_meta(nn.Linear(2, 2)), (), ids, output)
    assert (placement.device_ids, placement.output_device) == expected


def test_where_all_parameters_are_ignored_they_say_the_device() -> None:
    assert Placement.checked(nn.Linear(2, 2), ("weight", "bias"), None, None).device == CPU


@pytest.mark.parametrize(
    ("module", "ignored", "error", "text"),
    [
        (nn.LazyLinear(2), (), RuntimeError, "uninitialized parameters.*weight, bias"),
        (nn.Identity(), (), RuntimeError, "doesn't have any parameter that requires a gradient. This one has 0"),
        (nn.Linear(2, 2).requires_grad_(False), (), RuntimeError, "This one has 2 parameters"),
        (nn.Linear(2, 2), ("weight", "bias"), RuntimeError, "This one has 0 parameters"),
        (
            nn.Sequential(nn.SyncBatchNorm(2)),
            (),
            ValueError,
            "SyncBatchNorm layers only work with GPU modules, but 0",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(module: nn.Module, ignored: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        check_module(module, ignored, delayed=())


def test_delayed_parameters_are_enough() -> None:
    module = nn.Linear(2, 2)
    check_module(module, ("weight", "bias"), delayed=module.parameters())
    check_module(nn.Linear(2, 2), ("weight",), delayed=())


def test_sparse_parameters_belong_to_sparse_embeddings() -> None:
    module = nn.ModuleDict(
        {
            "sparse": nn.Embedding(3, 2, sparse=True),
            "bag": nn.EmbeddingBag(3, 2, sparse=True),
            "dense": nn.Embedding(3, 2),
            "linear": nn.Linear(2, 3),
        }
    )
    assert sparse_parameters(module) == {"sparse.weight", "bag.weight"}
    module["linear"].weight = module["sparse"].weight  # tied: the module that comes first decides
    assert sparse_parameters(module) == {"sparse.weight", "bag.weight", "linear.weight"}


@pytest.mark.parametrize(
    ("group", "mesh", "error", "text"),
    [
        (object(), object(), RuntimeError, "Cannot specify both"),
        (dist.GroupMember.NON_GROUP_MEMBER, None, ValueError, "not a member"),
        ("gloo", None, TypeError, "new_group returns, but got 'gloo'"),
        (None, torch.ones(1, 1), RuntimeError, "Only 1D device mesh"),
    ],
)
def test_what_is_no_group_is_refused(group: Any, mesh: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        resolve_group(group, mesh, nn.Linear(2, 2))
