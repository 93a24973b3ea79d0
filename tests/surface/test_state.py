"""What can be read, set and called on the wrapper and its reducer, for frameworks and for torch's tests."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.comm_hooks import GradBucket
from minddp.core.plan import plan_from_readiness
from tests.ranks import of_all_ranks, on_ranks
from tests.surface.models import Normed, TwoLayers, batch

WRAPPERS = (TorchDDP, minddp.DistributedDataParallel)
NEWER_OPTIONS = {"batched_grad_copy", "forward_sync_buffers"} - inspect.signature(TorchDDP).parameters.keys()
SETTINGS = (
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "broadcast_bucket_size",
    "is_multi_device_module",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
    "mixed_precision",
    "use_side_stream_for_tensor_copies",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "forward_sync_buffers",
    "broadcast_buffers",
    "device_ids",
    "output_device",
    "device_type",
    "device",
    "dim",
    "parameters_to_ignore",
    "_comm_hooks",
    "_lazy_init_ran",
    "_has_rebuilt_buckets",
    "_use_python_reducer",
    "_join_config",
)


# ------------------------------------------------------------------ settings


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 2, "gradient_as_bucket_view": True, "forward_sync_buffers": False},
        {"bucket_cap_mb_list": [1, 3], "batched_grad_copy": True, "static_graph": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ],
)
def test_settings_are_torchs(rank: int, options: dict[str, Any]) -> None:
    results = []
    for wrapper in WRAPPERS:
        ddp = wrapper(Normed(), **options)
        results.append({name: getattr(ddp, name) for name in SETTINGS if name not in NEWER_OPTIONS})
        names = {param: name for name, param in ddp.module.named_parameters()}
        results[-1]["_module_parameters"] = [names[param] for param in ddp._module_parameters]
        results[-1]["buffers"] = list(ddp.named_module_buffers), len(ddp.modules_buffers)
        results[-1]["will_sync"] = ddp.will_sync_module_buffers()
        for step in range(2):
            ddp(batch(rank, step)).sum().backward()
        results[-1]["rebuilt"] = ddp._has_rebuilt_buckets
        results[-1]["initialised"] = ddp._lazy_init_ran
    theirs, ours = results
    assert ours == theirs


@on_ranks(2)
def test_what_others_assign_has_effect(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(Normed())
    ddp.require_backward_grad_sync = False
    ddp(batch(rank)).sum().backward()
    assert not torch.equal(*of_all_ranks(ddp.module.layer.weight.grad)), "gradients stay local"
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True
    ddp.module.norm.running_mean.fill_(rank + 5)
    ddp.eval()
    ddp(batch(rank))
    assert ddp.module.norm.running_mean.tolist() == [5.0] * 4
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        setattr(ddp, name, False)
        assert not ddp.will_sync_module_buffers(), name
        setattr(ddp, name, True)


# ------------------------------------------------------------------ names and ignored parameters


@on_ranks(2)
def test_parameters_and_buffers_are_named_and_ignored_as_in_torch(rank: int) -> None:
    results = []
    for wrapper in WRAPPERS:
        module = nn.Sequential(TwoLayers(), Normed(), nn.Embedding(3, 4, sparse=True))
        module[0].second.weight = module[0].first.weight  # tied
        module[1].layer.bias.requires_grad_(False)
        ignored = ["0.first.bias", "1.norm.running_var"]
        wrapper._set_params_and_buffers_to_ignore_for_model(module, ignored)
        ddp = wrapper(module)
        params, sparse = ddp._build_params_for_reducer()
        mapping = ddp._build_debug_param_to_name_mapping(params)
        with pytest.raises(ValueError, match="Param with name"):
            ddp._build_debug_param_to_name_mapping(params[1:])
        with pytest.raises(ValueError, match="Expected param to name mapping"):
            ddp._build_debug_param_to_name_mapping([*params, nn.Parameter(torch.ones(1))])
        index = {param: place for place, param in enumerate(module.parameters())}
        results.append(
            (
                [index[param] for param in params],
                sparse,
                mapping,
                [index[param] for param in ddp._get_data_parallel_params(module)],
                list(ddp.named_module_buffers),
                sorted(ddp.parameters_to_ignore),
            )
        )
    # Torch leaves out none of them if asked for names.
    managed = [name for name, _ in ddp._get_data_parallel_params(module, named_params=True)]
    assert managed == [name for name, _ in module.named_parameters() if name != "0.first.bias"]
    theirs, ours = results
    assert ours == theirs


# ------------------------------------------------------------------ buffers


@on_ranks(2)
def test_buffers_can_be_synchronised_by_hand(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(Normed())
    mean = ddp.module.norm.running_mean.fill_(rank + 1)
    ddp._sync_buffers()
    assert mean.tolist() == [1.0] * 4
    mean.fill_(rank + 1)
    ddp._default_broadcast_coalesced(authoritative_rank=1)
    assert mean.tolist() == [2.0] * 4
    tensor = torch.full((3,), float(rank))
    ddp._distributed_broadcast_coalesced([tensor], 100, 1)
    assert tensor.tolist() == [1.0] * 3
    ddp.module.norm.running_mean = torch.zeros(4)
    ddp._sync_buffers()
    assert ddp.modules_buffers[0] is ddp.module.norm.running_mean


# ------------------------------------------------------------------ the reducer


@on_ranks(2)
def test_backward_can_be_armed_by_hand(rank: int) -> None:
    """Accelerate, Lightning, torch's pipelining: a backward is synchronised whose forward was not."""
    grads = []
    for wrapper in WRAPPERS:
        ddp = wrapper(TwoLayers())
        for step in range(3):
            with ddp.no_sync():
                output = ddp(batch(rank, step))
            ddp.reducer.prepare_for_backward([] if step else output)
            output.sum().backward()
            ddp._check_reducer_finalized()
            rebuilds = ddp.reducer._rebuild_buckets()
            assert rebuilds == (step == 0)
        grads.append([param.grad for param in ddp.parameters()])
    assert all(map(torch.equal, *grads))


@on_ranks(2)
def test_the_used_map_is_complete_after_backward(rank: int) -> None:
    results = []
    for wrapper in WRAPPERS:
        ddp = wrapper(TwoLayers(), find_unused_parameters=True)
        results.append([])
        for step in range(3):
            ddp(batch(rank, step), both=(step + rank) % 2 == 0).sum().backward()
            results[-1].append(ddp.reducer._get_local_used_map().tolist())
    theirs, ours = results
    assert ours == theirs == [[2, 2, 1, 1]] * 3


@on_ranks(2)
def test_without_find_unused_parameters_usage_is_not_counted(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    assert ddp.reducer._get_local_used_map() is None


@on_ranks(2)
def test_the_plain_hook_sums_in_place(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    [reduced] = ddp._reducer.store.all()
    bucket = GradBucket(reduced, reduced.comm_buffer, is_last=True)
    bucket.buffer().fill_(rank + 1)
    [total] = ddp.reducer._run_allreduce_hook(bucket).wait()
    assert [total.min().item(), bucket.buffer().max().item()] == [3.0, 3.0]


@on_ranks(2)
def test_backward_waits_for_installed_futures(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    tensor = torch.ones(1 << 16)
    ddp.reducer._install_post_backward_futures([ddp.process_group.allreduce([tensor]).get_future()])
    ddp(batch(rank)).sum().backward()
    assert (tensor == 2).all()


@on_ranks(2)
def test_a_graph_can_be_declared_static(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers(), find_unused_parameters=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp._set_static_graph()
        ddp._set_static_graph()
    texts = [str(warning.message) for warning in caught]
    assert ["find_unused_parameters=true" in text for text in texts] == [True, False]
    assert "no need to set it again" in texts[1]
    assert (ddp.static_graph, ddp._get_ddp_logging_data()["static_graph"]) == (True, 1)
    ddp(batch(rank), both=False).sum().backward()
    before = ddp.module.first.weight.grad.clone()
    ddp.reducer._delay_all_reduce()  # it has happened
    assert torch.equal(before, ddp.module.first.weight.grad)
    assert ddp.module.second.weight.grad is None


@on_ranks(2)
def test_without_hooks_gradients_stay_local(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    ddp._remove_autograd_hooks()
    ddp(batch(rank)).sum().backward()
    plain = TwoLayers()
    plain(batch(rank)).sum().backward()
    ddp(batch(rank))
    assert torch.equal(ddp.module.first.weight.grad, plain.first.weight.grad)


# ------------------------------------------------------------------ another group


@on_ranks(2)
def test_the_group_can_shrink_and_grow(rank: int) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([0])
    ddp = minddp.DistributedDataParallel(TwoLayers())
    for step in range(2):
        ddp(batch(rank, step)).sum().backward()
    assert ddp._has_rebuilt_buckets
    ddp._update_process_group(alone)
    assert not ddp._has_rebuilt_buckets
    assert ddp.process_group is (alone if rank == 0 else dist.group.WORLD)
    if rank == 0:
        ddp.zero_grad()
        ddp(batch(0)).sum().backward()
        plain = TwoLayers()
        plain(batch(0)).sum().backward()
        assert torch.equal(ddp.module.first.weight.grad, plain.first.weight.grad)
    ddp._update_process_group(pair)
    ddp.zero_grad()
    ddp(batch(rank)).sum().backward()
    assert torch.equal(*of_all_ranks(ddp.module.first.weight.grad))


@on_ranks(2)
def test_the_guard_of_another_group_knows_the_hook(rank: int) -> None:
    """It reported the replicas of local SGD, which differ on purpose."""
    ddp = minddp.DistributedDataParallel(TwoLayers())
    state = PostLocalSGDState(None, None, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook)
    ddp.move_to_group(dist.new_group([0, 1]))
    drift = ddp.guard.checks["drift"]
    assert "post_localSGD_hook" in drift._reducer
    assert drift._is_over


@on_ranks(2)
def test_ranks_that_differ_in_their_buckets_begin_anew_in_another_group(rank: int) -> None:
    """A rank may leave while rank 0 broadcasts the order: rank 0 has rebuilt its one bucket, rank 1 has not."""
    ddp = minddp.DistributedDataParallel(TwoLayers())
    if rank == 0:
        specs, store = ddp.plan.params, ddp._reducer.store
        store.adopt(plan_from_readiness(specs, [*range(len(specs))], [1 << 20]), ddp._transport.allocate)
        store.has_rebuilt = True
    assert len(ddp.plan.buckets) == 1
    ddp.move_to_group(dist.new_group([0, 1]))
    ddp(batch(rank)).sum().backward()
    (ours, our_plan), (theirs, their_plan) = of_all_ranks(([param.grad for param in ddp.parameters()], ddp.plan))
    assert all(map(torch.equal, ours, theirs))
    assert our_plan == their_plan


def own_average(_state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(2)
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


@on_ranks(2)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"check_finite": True}], ids=repr)
def test_a_group_that_is_stuck_is_left_behind(rank: int, hooked: bool, options: dict[str, Any]) -> None:
    """With a hook each launch raised again. The old transport must be free."""
    ddp = minddp.DistributedDataParallel(TwoLayers(), process_group=dist.new_group([0, 1]), **options)
    if hooked:
        ddp.register_comm_hook(None, own_average)
    ddp(batch(rank)).sum().backward()
    old = ddp._transport
    old.end_waits("the old group is stuck")
    old = [weakref.ref(old), weakref.ref(old._transport)]
    ddp.move_to_group(dist.new_group([0, 1]))
    seen = []
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).sum().backward()
        seen.append(ddp.module.first.weight.grad.sum().item())
    gc.collect()
    assert [ref() for ref in old] == [None, None]
    assert of_all_ranks(seen) == [seen] * 2
    assert len(set(seen)) > 1


# ------------------------------------------------------------------ copies, and being the active module


hooked: list[tuple[str, int]] = []


def kept_hook(state: str, buffers: dict[str, torch.Tensor]) -> None:
    hooked.append((state, id(buffers["norm.running_mean"])))


@on_ranks(2)
def test_copies_have_a_reducer_and_a_logger_of_their_own(rank: int) -> None:
    def local_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return group.allreduce([bucket.buffer()]).get_future()

    ddp = minddp.DistributedDataParallel(Normed(), find_unused_parameters=True)
    ddp.register_comm_hook(ddp.process_group, local_hook)  # cannot be pickled, and need not
    ddp(batch(rank)).sum().backward()
    ddp.register_buffer_hook("means", kept_hook)  # which torch lets a copy keep
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        twin.zero_grad()
        hooked.clear()
        for step in range(2):
            twin(batch(rank, step)).sum().backward()
        data = twin._get_ddp_logging_data()
        assert twin.reducer is not ddp.reducer
        assert twin.logger is not ddp.logger
        assert (data["iteration"], data["module_name"]) == (1, "Normed")
        assert hooked == [("means", id(twin.module.norm.running_mean))] * 2


class Asks(nn.Module):
    """Records the module that torch.compile would take for active while it runs."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = inner
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.active()]
        if self.inner is not None:
            x = self.inner(x)
            self.seen.append(self.active())
        return self.layer(x)

    def active(self) -> tuple[Any, ...]:
        return TorchDDP._get_active_ddp_module(), minddp.DistributedDataParallel._get_active_ddp_module()


@on_ranks(2)
def test_the_module_whose_forward_runs_is_the_active_one(rank: int) -> None:
    inner = minddp.DistributedDataParallel(Asks())
    outer = minddp.DistributedDataParallel(Asks(inner))
    outer(batch(rank))
    assert outer.module.seen == [(outer,) * 2] * 2
    assert inner.module.seen == [(inner,) * 2]
    assert outer.module.active() == (None,) * 2
    with outer._inside_ddp_forward():
        assert outer.module.active() == (outer,) * 2


@on_ranks(2)
def test_old_helpers(rank: int) -> None:
    ddp = minddp.DistributedDataParallel(TwoLayers())
    ddp._set_ddp_sink_clone(False)
    output = ddp(batch(rank))
    output += 1  # outputs may be modified in place
    output.sum().backward()
    assert ddp.train() is ddp
    assert ddp.to_kwargs((torch.ones(2),), {"key": 1}, 0)[1] == ({"key": 1},)
    assert ddp._ddp_sink_clone is False
