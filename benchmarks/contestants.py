"""Who races: the bare module, and torch's and minddp's wrapper at the same settings."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

SettingName = Literal["default", "views", "static", "batched", "views_static"]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "views_static": {"gradient_as_bucket_view": True, "static_graph": True},
}

FLOOR = "no wrapper"


def native(setting: str) -> str:
    """The name of torch's contestant at this setting."""
    return f"torch {setting}"


def candidate(setting: str) -> str:
    """The name of the contestant in minddp's seat at this setting."""
    return f"minddp {setting}"


def heats(settings: Sequence[str]) -> list[list[str]]:
    """The floor by itself, then for each setting the two to be compared."""
    return [[FLOOR], *([native(setting), candidate(setting)] for setting in settings)]


def build(model: nn.Module, settings: Sequence[str], control: bool) -> dict[str, nn.Module]:
    """One copy of `model` for each contestant, so that all start from the same weights."""
    wrap = candidate_class(control)
    models = {FLOOR: copy.deepcopy(model)}
    for setting in settings:
        models[native(setting)] = NativeDDP(copy.deepcopy(model), **SETTINGS[setting])
        models[candidate(setting)] = wrap(copy.deepcopy(model), **SETTINGS[setting])
    return models


def candidate_class(control: bool) -> Callable[..., nn.Module]:
    """The class in minddp's seat, which in a control run is torch's."""
    if control:
        return NativeDDP
    import minddp

    return minddp.DistributedDataParallel


def unknown_to_torch(settings: Sequence[str]) -> list[str]:
    """Those of `settings` that the installed torch has no option for (`batched_grad_copy` is young)."""
    known = inspect.signature(NativeDDP).parameters
    return [setting for setting in settings if not set(SETTINGS[setting]) <= set(known)]
