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


def unfinished(rank: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(TwoLayers(), stuck_after_s=None)
    step(ddp, rank)
    step(ddp, rank, both=False)
    return data_after(ddp, RuntimeError, lambda: step(ddp, rank))


def unfinished_before_the_optimizer(rank: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(TwoLayers(), stuck_after_s=None)
    optimizer = torch.optim.SGD(ddp.parameters())
    step(ddp, rank, both=False)
    return data_after(ddp, RuntimeError, optimizer.step)


def not_finalized(rank: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(TwoLayers(), stuck_after_s=None)
    step(ddp, rank, both=False)
    return data_after(ddp, RuntimeError, ddp._check_reducer_finalized)


@pytest.mark.parametrize(
    ("act", "iteration"), [(unfinished, 3), (unfinished_before_the_optimizer, 1), (not_finalized, 1)]
)
def test_an_unfinished_reduction_is_noted(ranks, act: Any, iteration: int) -> None:
    for data in ranks(2).run(act):
        assert data["has_error"] == 1
        assert data["error"] == data["raised"]
        assert "Expected to have finished reduction in the prior iteration" in data["error"]
        assert data["iteration"] == iteration  # the rank at which the error occurred


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


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (ready_twice, "Expected to mark a variable ready only once"),
        (wrong_dtype, "Expected torch.float32, got torch.float64"),
        (failing_reduction, "the cable is out"),
    ],
)
def test_an_error_in_backward_is_noted(ranks, act: Any, words: str) -> None:
    for data in ranks(2).run(act):
        assert words in data["error"]


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


def helpers(rank: int) -> list[dict[str, Any]]:
    sparse = [torch.ones(4).to_sparse()]
    uneven = [torch.zeros(rank + 1)]
    buckets, shapes = minddp.DistributedDataParallel(TwoLayers()), minddp.DistributedDataParallel(TwoLayers())
    step(buckets, rank)
    logged = [
        data_after(
            buckets,
            RuntimeError,
            lambda: dist._compute_bucket_assignment_by_size(sparse, [400], logger=buckets.logger),
        )
    ]
    try:
        dist._verify_params_across_processes(shapes.process_group, uneven, shapes.logger)
    except RuntimeError as error:
        logged.append(shapes._get_ddp_logging_data() | {"raised": str(error)})
    return logged


def test_torchs_helpers_note_their_errors(ranks) -> None:
    logged = ranks(2).run(helpers)
    assert [len(on_rank) for on_rank in logged] == [1, 2]  # the others are compared with rank 0
    for data in logged[0] + logged[1]:
        assert data["has_error"] == 1
        assert data["error"].splitlines()[0] in data["raised"]
    assert logged[0][0]["error"] == "No support for sparse tensors."
    assert logged[0][0]["iteration"] == 1
    assert "appears not to match sizes" in logged[1][1]["error"]


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
