"""Constructor options: what is refused, what the capacities come to, and that defaults are torch's."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.options import MIB, UNBOUNDED, BucketCaps
from tests.fakes import options

FLAGS = (
    "init_sync",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls.__init__).parameters)


@pytest.mark.skipif(
    "forward_sync_buffers" not in parameters_of(TorchDDP), reason="the model is the signature of torch 2.13"
)
def test_the_constructor_has_torchs_parameters_then_its_own() -> None:
    theirs, ours = parameters_of(TorchDDP), parameters_of(minddp.DistributedDataParallel)
    if "lazy_bucket_allocation" not in theirs:  # which torch 2.15 has
        assert not ours.pop("lazy_bucket_allocation").default
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    own = list(ours.values())[len(theirs) :]
    assert [parameter.name for parameter in own] == [
        "transport",
        "first_bucket_cap_mb",
        "extensions",
        "stuck_after_s",
        "on_drift",
        "logical_ranks",
        "check_finite",
    ]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in own)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in own)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["False", [True], object()])
def test_flags_that_are_no_flags_are_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be True or False"):
        options(**{name: value})


@pytest.mark.parametrize("cap", ["25", "big", True, [25], 25j])
def test_a_capacity_of_the_wrong_type_is_refused(cap: object) -> None:
    with pytest.raises(TypeError, match="`bucket_cap_mb` takes mebibytes as numbers, but got"):
        options(bucket_cap_mb=cap)
    with pytest.raises(TypeError, match="`bucket_cap_mb_list` takes mebibytes as numbers, but got"):
        options(bucket_cap_mb_list=[1, cap])


@pytest.mark.parametrize("cap", [-1, -0.001, math.inf, -math.inf, math.nan, 2.0**60])
def test_a_capacity_out_of_range_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="`bucket_cap_mb` takes a finite number"):
        options(bucket_cap_mb=cap)
    with pytest.raises(ValueError, match="`bucket_cap_mb_list` takes a finite number"):
        options(bucket_cap_mb_list=[cap])


def test_one_capacity_and_a_list_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"`bucket_cap_mb` \(3\) and `bucket_cap_mb_list` \(\[1, 2\]\) exclude"):
        options(bucket_cap_mb=3, bucket_cap_mb_list=[1, 2])


def test_default_capacities_are_torchs() -> None:
    caps = options().caps
    assert caps == BucketCaps(dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB)
    assert caps.before_rebuild(order_is_final=False) == (UNBOUNDED,)
    assert caps.before_rebuild(order_is_final=True) == caps.after_rebuild() == (MIB, 25 * MIB)


def test_a_given_capacity_also_holds_for_the_first_bucket() -> None:
    caps = options(bucket_cap_mb=25).caps
    assert caps.before_rebuild(order_is_final=True) == (25 * MIB, 25 * MIB)
    assert caps.after_rebuild() == (25 * MIB, 25 * MIB)


@pytest.mark.parametrize(("mib", "nbytes"), [(0, 0), (1e-7, 0), (0.0001, 104), (2, 2 * MIB), (0.5, MIB // 2)])
def test_fractions_of_a_mebibyte_are_cut_to_whole_bytes(mib: float, nbytes: int) -> None:
    assert options(bucket_cap_mb=mib).caps.rest_bytes == nbytes
    assert options(bucket_cap_mb_list=[mib]).caps.each_bytes == (nbytes,)


def test_a_list_gives_each_bucket_its_own_capacity_before_and_after() -> None:
    caps = options(bucket_cap_mb_list=[1, 0.5]).caps
    for final in (False, True):
        assert caps.before_rebuild(order_is_final=final) == (MIB, MIB // 2)
    assert caps.after_rebuild() == (MIB, MIB // 2)


def test_torchs_switch_for_a_small_last_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_SET_LAST_BUCKET_CAP", raising=False)
    assert not options().small_last_bucket
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    assert options().small_last_bucket


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"forward_sync_buffers": True}, []),
        ({"broadcast_buffers": True}, ["`broadcast_buffers` is deprecated: use `forward_sync_buffers`"]),
        (
            {"broadcast_buffers": True, "forward_sync_buffers": True},
            ["`broadcast_buffers` is deprecated: its value is ignored"],
        ),
        ({"check_reduction": True}, ["`check_reduction` is deprecated and has no effect"]),
    ],
)
def test_deprecation_warnings_point_at_the_call_of_the_constructor(
    given: dict[str, bool], texts: list[str]
) -> None:
    """They precede the error that there is no process group."""
    module = nn.Linear(1, 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="process group"):
            minddp.DistributedDataParallel(module, **given)
        where = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert len(warned) == len(texts)
    for warning, text in zip(warned, texts, strict=True):
        assert str(warning.message).startswith(text)
        assert (warning.filename, warning.lineno) == (__file__, where)
