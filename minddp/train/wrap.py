"""The model's wrapper: minddp's DistributedDataParallel, torch's, or none, with one interface."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from minddp.train.settings import Settings, SettingsError
from minddp.train.world import World


def wrapper_class(name: str) -> type[nn.Module]:
    """The class behind `--ddp minddp` or `--ddp torch`."""
    if name == "torch":
        return nn.parallel.DistributedDataParallel
    from minddp import DistributedDataParallel

    return DistributedDataParallel


def check_wrapper(settings: Settings) -> None:
    """Raise SettingsError for options that the chosen wrapper does not have."""
    if settings.ddp == "none":
        return
    known = inspect.signature(wrapper_class(settings.ddp)).parameters
    unknown = sorted(set(settings.wrapper.chosen()) - set(known))
    if unknown:
        raise SettingsError(
            f"--ddp {settings.ddp} (torch {torch.__version__}) has no option {', '.join(unknown)}; leave that out."
        )


def wrap(model: nn.Module, settings: Settings, world: World) -> nn.Module:
    """The model, made data-parallel: gradients are averaged over the ranks while backward runs."""
    if settings.ddp == "none":
        return model
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return wrapper_class(settings.ddp)(model, device_ids=device_ids, **settings.wrapper.chosen())


def accumulating(ddp: nn.Module, keep_local: bool) -> AbstractContextManager[None]:
    """Keep this pass's gradients on the rank, to be averaged together with those of a later pass.

    The forward belongs inside, too: it is there that DDP decides whether the coming backward communicates.
    """
    no_sync = getattr(ddp, "no_sync", None)  # a model without a wrapper has none
    return no_sync() if keep_local and no_sync is not None else nullcontext()
