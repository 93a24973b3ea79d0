"""Every member of torch's wrapper and of what hangs on it is here too, or its absence has a reason."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.compat.reducer_facade import ReducerFacade
from tests.ranks import RankPool
from tests.surface.models import Normed, batch

REASONS = {
    "a piece of the constructor; see compat/compiled.py": ("_register_accum_grad_hook", "_accum_grad_hooks"),
    "holds the same as bucket_bytes_cap and similar members; never read": (
        "_bucket_config",
        "bucket_bytes_cap_default",
    ),
    "has no callers outside of torch's class": (
        "_distributed_rank",
        "_sync_module_buffers",
    ),
    "a piece of the constructor; see _connect": ("_ddp_init_helper",),
    "a piece of the constructor; see delayed.py": ("_register_delay_all_reduce_hook",),
    "registered on a parameter; see delayed.py": ("_delayed_all_reduce_hook",),
    "what a delayed all-reduce works on; see delayed.py": (
        "_delay_all_reduce_params",
        "_delay_all_reduce_all_params",
        "_delay_grad_buffer",
        "_delay_grad_views",
    ),
    "a piece of forward; see delayed.py": ("_clear_grad_buffer",),
    "a piece of forward; see Buffers.collect": ("_assign_modules_buffers",),
    "a piece of forward that no caller outside of torch's class was found for; see _synchronizes_buffers": (
        "_check_sync_bufs_pre_fwd",
        "_check_sync_bufs_post_fwd",
    ),
    "a piece of forward that no caller outside of torch's class was found for; see _run_module": (
        "_run_ddp_forward",
    ),
    "a piece of the first forward; see _lazy_init": ("_setup_in_backward_optimizers",),
    "a piece of register_comm_hook": ("_check_comm_hook",),
    "a piece of __getstate__": ("_check_default_group",),
    "a step of a rank without inputs; see modes/join.py": (
        "_check_and_sync_module_buffers",
        "_check_global_requires_backward_grad_sync",
        "_match_all_reduce_for_bwd_pass",
        "_match_unused_params_allreduce",
        "_sync_final_model",
        "_find_common_rank",
    ),
    "a piece of the constructor; see check_module in placement.py": ("_passing_sync_batchnorm_handle",),
    "needs a torch that was built with NCCLX": ("_set_sparse_metadata",),
    "left over from replicas on several devices; never called": ("_get_parameters",),
    "how torch does mixed precision; see mixed_precision.py": (
        "_fire_reducer_autograd_hook",
        "_module_wait_for_copy_hook",
        "_root_copy_hook",
    ),
}
OMITTED = {name for names in REASONS.values() for name in names}
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
    pool: RankPool = ranks(2)
    missing, _ = pool.run(members)
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


def test_the_class_is_torchs_for_isinstance_once_registered() -> None:
    minddp.register()
    assert issubclass(minddp.DistributedDataParallel, TorchDDP)
    assert issubclass(minddp.DistributedDataParallel, torch.nn.Module)
