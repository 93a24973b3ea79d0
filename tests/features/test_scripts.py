"""What scripts do with gradients and wrappers, run with both classes: none of it may show a difference.

Each script is one habit of training loops, kept up for some steps: under the first plan and under the final one.
Not repeated here: the lines of `tests/parity/` (several backwards, zero_grad, checkpoints, other gradients)
and what keeps a gradient alive (`tests/core/test_gradient_aliasing.py`).
The model has gradients large enough to be aliased, and others that are too small ([Note: gradient aliasing]).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.features import habits
from tests.features.beside import Steps, Trail, Wrap, assert_same, play, random
from tests.features.habits import CALM_STEPS, STEPS, grads, layers, loss_of, losses, narrow
from tests.modules import Explosive
from tests.ranks import of_all_ranks, on_ranks

Script = Callable[..., Steps]


# ------------------------------------------------------------------ the scripts, played

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "buckets": {"bucket_cap_mb": 0.1},  # several
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}
ALL = "default buckets static unused views"
NO_VIEWS = "default buckets static unused"  # those show what is reduced so far, or torch raises or is wrong
LARGE = "default buckets"  # where gradients alias the bucket

SCRIPTS: dict[str, tuple[Script, str]] = {
    "watches gradients go": (habits.watches_gradients_go, LARGE),
    "keeps what arrives": (habits.keeps_what_arrives, ALL),
    "looks from accumulators": (habits.looks_from_accumulators, NO_VIEWS),
    "clears all at the end": (partial(habits.replaces_all_at_the_end, what="clears"), NO_VIEWS),
    "flattens before wrapping": (partial(habits.flattens, wraps_first=False), NO_VIEWS),
    "flattens after wrapping": (partial(habits.flattens, wraps_first=True), NO_VIEWS),
    "accumulates into its own memory": (habits.accumulates_into_its_own_memory, ALL),
    **{
        f"{name}{more}": (partial(habits.handles, what=what, zeroing=not more), settings)
        for name, what, settings in (
            ("puts data", habits.put_data, NO_VIEWS),
            ("sets memory", habits.set_memory, NO_VIEWS),
        )
        for more in ("", " and accumulates")
    },
    "transposes": (partial(habits.handles, what=habits.transpose), NO_VIEWS),
    "unsqueezes": (partial(habits.handles, what=habits.unsqueeze), NO_VIEWS),
    "requires grad of gradients": (partial(habits.handles, what=habits.require_grad), ALL),
    "marks gradients": (partial(habits.handles, what=habits.mark), ALL),
    "wraps within": (habits.wraps_within, NO_VIEWS),
    "wraps parts": (habits.wraps_parts, ALL),
    "turns channels last early": (partial(habits.turns_channels_last, turn=1), "default buckets views"),
    "turns channels last late": (partial(habits.turns_channels_last, turn=CALM_STEPS), "views"),
    "watches small gradients go": (partial(habits.watches_gradients_go, small=True), ALL),
    "steps in hooks": (partial(habits.steps_in_hooks, to_none=True), ALL),
    "steps in hooks and zeroes": (partial(habits.steps_in_hooks, to_none=False), ALL),
    **{
        f"{what} all at the end": (partial(habits.replaces_all_at_the_end, what=what), LARGE)
        for what in ("drops", "replaces", "wraps anew", "puts data")
    },
    "reduces by a hook": (partial(habits.reduces_by_a_hook, kinds=["itself"]), ALL),
    "reduces by a hook that gives others": (
        partial(habits.reduces_by_a_hook, kinds=["copy", "itself", "alias"]),
        ALL,
    ),
}


def with_options(wrap: Wrap, rank: int, script: Script, options: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    return list(script(partial(wrap, **options), rank))


@on_ranks(3)
@pytest.mark.parametrize("detaches", [False, True])
def test_what_lies_in_the_buffer_is_divided_as_torch_does(rank: int, detaches: bool) -> None:
    """Also if this backward has put it there. On three ranks a division and a multiplication differ."""
    for setting in ("default", "views"):
        play(rank, with_options, partial(habits.restores, detaches=detaches), SETTINGS[setting])


@on_ranks(2)
@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(script, SETTINGS[setting], id=f"{name}, {setting}")
        for name, (script, settings) in SCRIPTS.items()
        for setting in settings.split()
    ],
)
def test_bits_are_torchs(rank: int, script: Script, options: dict[str, Any]) -> None:
    play(rank, with_options, script, options)


# ------------------------------------------------------------------ where torch is wrong


def _is_right_alone(rank: int, script: Script, options: dict[str, Any], right: dict[str, Any]) -> None:
    """With `options` torch is wrong. minddp has torch's strides, and the values that torch has with `right`."""
    expected = with_options(TorchDDP, rank, script, right)
    theirs = with_options(TorchDDP, rank, script, options)
    ours = with_options(minddp.DistributedDataParallel, rank, script, options)
    assert _strides(ours) == _strides(theirs)
    assert_same(_row_major(expected), _row_major(ours), f"rank {rank}")
    with pytest.raises(AssertionError, match=r"grad': 'differs in"):
        assert_same(_row_major(expected), _row_major(theirs), f"rank {rank}")


def _strides(trail: Trail) -> list[Any]:
    return [(name, tensor.stride()) for step in trail for name, tensor in step.items() if tensor is not None]


def _row_major(trail: Trail) -> Trail:
    return [{name: t if t is None else t.contiguous() for name, t in step.items()} for step in trail]


@on_ranks(2)
@pytest.mark.parametrize("zeroing", [True, False], ids=["zeroed", "accumulated"])
@pytest.mark.parametrize("what", [habits.put_data, habits.set_memory])
def test_other_memory_under_a_view_is_averaged(rank: int, what: Callable[[Any], None], zeroing: bool) -> None:
    """Torch goes on with the bucket's, and averages what is no gradient any more."""
    script = partial(habits.handles, what=what, zeroing=zeroing)
    _is_right_alone(rank, script, SETTINGS["views"], SETTINGS["default"])


@on_ranks(2)
@pytest.mark.parametrize("setting", ["default", "buckets", "static", "unused"])
def test_parameters_may_change_their_strides(rank: int, setting: str) -> None:
    """Under the final plan. Torch's buckets keep the old ones, and its averages come back in another order."""
    script = partial(habits.turns_channels_last, turn=CALM_STEPS)
    _is_right_alone(rank, script, SETTINGS[setting], SETTINGS["views"])


# ------------------------------------------------------------------ what the scripts rely on


@on_ranks(2)
def test_large_gradients_alias_the_bucket(rank: int) -> None:
    """Weight and bias of each layer. Otherwise some scripts would test nothing."""
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(layers())
    for _step, loss in losses(ddp, rank):
        loss.backward()
    aliased = [grad.untyped_storage().nbytes() > grad.nbytes for grad in grads(ddp)]
    assert aliased == [True, False, True, False, False, False]


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_a_script_may_free_the_memory_of_gradients(rank: int, views: bool) -> None:
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(layers(), transport="process_group", gradient_as_bucket_view=views)
    found = []
    for _ in range(STEPS):
        loss_of(ddp, rank, 0).backward()
        found.append([grad.clone() for grad in grads(ddp)])
        for param in ddp.parameters():
            param.grad.untyped_storage().resize_(0)
            param.grad = None
    assert all(all(map(torch.equal, found[0], later)) for later in found)


class Parts(nn.Module):
    """Two parts; the forward leaves out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


@on_ranks(2)
def test_gradients_of_a_skipped_bucket_are_not_kept_alive(rank: int) -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0005}
    ddp, gone = minddp.DistributedDataParallel(Parts(), **options), []
    for _ in range(STEPS):
        for param in ddp.module.second.parameters():
            param.grad = torch.ones_like(param)
        ddp(random(4, 8, rank=rank)).sum().backward()
        references = [weakref.ref(grad) for grad in grads(ddp)]
        ddp.zero_grad()
        gone += [reference() is None for reference in references]
    assert gone == [True] * 6 * STEPS


@on_ranks(2)
def test_gradients_of_an_interrupted_backward_are_released_by_the_next_forward(rank: int) -> None:
    explosive = Explosive()
    ddp = minddp.DistributedDataParallel(nn.Sequential(*narrow()[:2], explosive, *narrow()[2:]))
    for step in range(CALM_STEPS + 1):
        ddp.zero_grad()
        explosive.arm(step == CALM_STEPS)
        with suppress(KeyError):
            loss_of(ddp, rank, step).backward()
    explosive.arm(False)
    references = [weakref.ref(grad) for grad in grads(ddp)]
    ddp.zero_grad()
    loss_of(ddp, rank, 0)
    gone = [reference() is None for reference in references]
    assert len(gone) > 30
    assert all(gone)


@on_ranks(2)
@pytest.mark.parametrize("step", [0, CALM_STEPS])
@pytest.mark.parametrize("no_sync", [True, False])
def test_a_forward_within_its_own_backward_is_an_error(rank: int, no_sync: bool, step: int) -> None:
    """As in torch: or else the gradients of this backward would stay local without an error."""
    ddp = minddp.DistributedDataParallel(narrow())
    is_trouble = False

    def forward(*_: Any) -> None:
        if is_trouble:
            with torch.enable_grad(), ddp.no_sync() if no_sync else nullcontext():
                loss_of(ddp, rank, STEPS)

    ddp.module[2].register_full_backward_hook(forward)
    for current, loss in losses(ddp, rank):
        is_trouble = current == step
        if is_trouble:
            with pytest.raises(RuntimeError, match=r"still running.*has called the forward itself"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(*of_all_ranks(ddp.module[0].weight.grad)), current
