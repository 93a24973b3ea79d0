"""Every member of torch's wrapper and of what hangs on it is here too, or its absence has a reason."""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.compat.reducer_facade import ReducerFacade
from tests.surface.models import Normed, batch

# Methods: docs/torch_map.yaml says what answers to each of them, or why nothing does. Attributes: what a delayed
# all-reduce works on (see modes/delayed.py), and what is in `bucket_bytes_cap` and similar members.
OMITTED = {
    "_require_manual_backward_finalization",
    "_register_accum_grad_hook",
    "_accum_grad_hooks",
    "_distributed_rank",
    "_sync_module_buffers",
    "_ddp_init_helper",
    "_register_delay_all_reduce_hook",
    "_delayed_all_reduce_hook",
    "_clear_grad_buffer",
    "_assign_modules_buffers",
    "_check_sync_bufs_pre_fwd",
    "_check_sync_bufs_post_fwd",
    "_run_ddp_forward",
    "_setup_in_backward_optimizers",
    "_check_comm_hook",
    "_check_default_group",
    "_check_and_sync_module_buffers",
    "_check_global_requires_backward_grad_sync",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_sync_final_model",
    "_find_common_rank",
    "_passing_sync_batchnorm_handle",
    "_set_sparse_metadata",
    "_get_parameters",
    "_fire_reducer_autograd_hook",
    "_module_wait_for_copy_hook",
    "_root_copy_hook",
    "_delay_all_reduce_params",
    "_delay_all_reduce_all_params",
    "_delay_grad_buffer",
    "_delay_grad_views",
    "_bucket_config",
    "bucket_bytes_cap_default",
}
# Members of pybind's making.
PYBIND = {"_pybind11_conduit_v1_"}
# Methods of the reducer that implement what the wrapper does, and have no other callers.
OF_TORCHS_WRAPPER = {
    "_set_forward_pass_work_handle",
    "_set_optimizer_in_backward",
    "_finalize_backward_manual",
    "_set_manual_finalization_required",
    "_should_finalize_after_backward",
    "_set_mixed_precision_param_dtype",
    "_get_zeros_like_grad_buckets",
    "_run_comm_hook",
    "_push_all_rebuilt_params",
}
# Methods of the reducer that no caller outside of torch's reducer was found for.
UNUSED = {"get_backward_stats", "_set_sparse_metadata", "_autograd_hook"}


def members(rank: int) -> dict[str, set[str]]:
    torch_ddp, ddp = TorchDDP(Normed()), minddp.DistributedDataParallel(Normed())
    for wrapper in (torch_ddp, ddp):
        wrapper(batch(rank)).sum().backward()
    return {
        "wrapper": set(dir(torch_ddp)) - set(dir(ddp)),
        "reducer": set(dir(torch_ddp.reducer)) - set(dir(ddp.reducer)),
        "logger": set(dir(torch_ddp.logger)) - set(dir(ddp.logger)),
        "here": set(dir(ddp)),
    }


def test_what_torch_has_is_here_or_has_a_reason(ranks) -> None:
    missing, _ = ranks(2).run(members)
    # Another version of torch may lack what is listed, but must not have more than is listed.
    assert missing["wrapper"] <= OMITTED
    assert missing["reducer"] <= PYBIND | OF_TORCHS_WRAPPER | UNUSED
    assert missing["logger"] == set()
    assert not OMITTED & missing["here"]


def test_parameters_are_named_as_in_torch() -> None:
    """Arguments are accepted by keyword and by position, as torch's are."""
    for name, method in inspect.getmembers(TorchDDP, inspect.isfunction):
        if name in OMITTED or name not in TorchDDP.__dict__ or name in ("__init__", "train", "__setstate__"):
            continue
        theirs = inspect.signature(method).parameters
        ours = inspect.signature(getattr(minddp.DistributedDataParallel, name)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values()):
            continue
        assert list(ours)[: len(theirs)] == list(theirs), name


def test_reducer_and_logger_take_what_torchs_take() -> None:
    """Their signatures are in the first line of the docstrings."""
    for ours, theirs in ((ReducerFacade, dist.Reducer), (minddp.compat.logger.Logger, dist.Logger)):
        for name, method in vars(ours).items():
            documented = (getattr(theirs, name, None).__doc__ or "") if hasattr(theirs, name) else ""
            if name.startswith("__") or not documented.startswith(name) or isinstance(method, property):
                continue
            num_arguments = documented.splitlines()[0].partition("->")[0].count(": ")
            if "Overloaded" not in documented:
                assert len(inspect.signature(method).parameters) == num_arguments, name
