"""Errors of minddp or torch's helpers about a wrapper are in its logging data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import minddp
from tests.ranks import on_ranks
from tests.surface.models import TwoLayers, batch


def data_after(ddp: nn.Module, error: type[Exception], act: Any) -> dict[str, Any]:
    with pytest.raises(error) as raised:
        act()
    return ddp._get_ddp_logging_data() | {"raised": str(raised.value)}


def step(ddp: nn.Module, rank: int, **kwargs: Any) -> None:
    ddp(batch(rank), **kwargs).sum().backward()


# ------------------------------------------------------------------ of a backward and its end


@on_ranks(2)
@pytest.mark.parametrize(("noticed_by", "iteration"), [("forward", 3), ("optimizer", 1), ("check", 1)])
def test_an_unfinished_reduction_is_noted(rank: int, noticed_by: str, iteration: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers(), stuck_after_s=None)
    acts = {
        "forward": lambda: step(ddp, rank),
        "optimizer": torch.optim.SGD(ddp.parameters()).step,
        "check": ddp._check_reducer_finalized,
    }
    if noticed_by == "forward":
        step(ddp, rank)
    step(ddp, rank, both=False)
    data = data_after(ddp, RuntimeError, acts[noticed_by])
    assert data["has_error"] == 1
    assert data["error"] == data["raised"]
    assert "Expected to have finished reduction in the prior iteration" in data["error"]
    assert data["iteration"] == iteration  # the one in which the error occurred


class HalfCheckpointed(TwoLayers):
    """The second layer does not show in the graph: it counts as unused, and then has a gradient."""

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


def ready_twice(rank: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(HalfCheckpointed(), find_unused_parameters=True, stuck_after_s=None)
    return data_after(ddp, RuntimeError, lambda: step(ddp, rank))


def wrong_dtype(rank: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(TwoLayers(), stuck_after_s=None)

    def widen(param: torch.Tensor) -> None:
        param.data, param.grad = param.data.double(), None
        param.grad = torch.zeros_like(param)

    ddp.module.first.bias.register_post_accumulate_grad_hook(widen)
    return data_after(ddp, RuntimeError, lambda: step(ddp, rank))


def failing_reduction(rank: int) -> dict[str, Any]:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(ValueError("the cable is out"))
        return future

    ddp = minddp.DistributedDataParallel(TwoLayers(), stuck_after_s=None)
    ddp.register_comm_hook(None, hook)
    return data_after(ddp, ValueError, lambda: step(ddp, rank))


@on_ranks(2)
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (ready_twice, "Expected to mark a variable ready only once"),
        (wrong_dtype, "Expected torch.float32, got torch.float64"),
        (failing_reduction, "the cable is out"),
    ],
)
def test_an_error_in_backward_is_noted(rank: int, act: Any, words: str) -> None:
    assert words in act(rank)["error"]


# ------------------------------------------------------------------ of calls


@on_ranks(2)
def test_errors_of_calls_are_noted(rank: int) -> None:
    def fresh() -> Any:
        return minddp.DistributedDataParallel(TwoLayers())

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("never called")

    hooked = fresh()
    hooked.register_comm_hook(None, hook)
    trained, no_hook, no_rate, no_names = fresh(), fresh(), fresh(), fresh()
    step(trained, rank)
    group = dist.new_group([0, 1])
    elsewhere = minddp.DistributedDataParallel(TwoLayers(), process_group=group)
    for data in (
        data_after(trained, RuntimeError, trained._set_static_graph),
        data_after(hooked, RuntimeError, lambda: hooked.register_comm_hook(None, hook)),
        data_after(no_hook, TypeError, lambda: no_hook.register_comm_hook({}, {})),
        data_after(no_rate, ValueError, lambda: no_rate._set_ddp_runtime_logging_sample_rate(0)),
        data_after(no_names, ValueError, lambda: no_names._build_debug_param_to_name_mapping([])),
        data_after(elsewhere, RuntimeError, elsewhere.__getstate__),
    ):
        assert data["has_error"] == 1
        assert data["raised"] in data["error"]


# ------------------------------------------------------------------ of torch's helpers, in C++


@on_ranks(2)
def test_torchs_helpers_note_their_errors(rank: int) -> None:
    sparse = [torch.ones(4).to_sparse()]
    uneven = [torch.zeros(rank + 1)]
    buckets, shapes = minddp.DistributedDataParallel(TwoLayers()), minddp.DistributedDataParallel(TwoLayers())
    step(buckets, rank)

    def assign() -> None:
        dist._compute_bucket_assignment_by_size(sparse, [400], logger=buckets.logger)

    def verify() -> None:
        dist._verify_params_across_processes(shapes.process_group, uneven, shapes.logger)

    data = data_after(buckets, RuntimeError, assign)
    assert (data["has_error"], data["error"], data["iteration"]) == (1, "No support for sparse tensors.", 1)
    assert data["error"] in data["raised"]
    if rank == 0:  # the others are compared with it
        verify()
    else:
        data = data_after(shapes, RuntimeError, verify)
        assert data["has_error"] == 1
        assert data["error"].splitlines()[0] in data["raised"]
        assert "appears not to match sizes" in data["error"]


# ------------------------------------------------------------------ after an error


@on_ranks(2)
def test_an_error_stays_noted_while_iterations_go_on(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    with pytest.raises(TypeError):
        ddp.register_comm_hook({}, {})
    for _ in range(3):
        step(ddp, rank)
    data = ddp._get_ddp_logging_data()
    assert (data["has_error"], data["iteration"]) == (1, 2)
