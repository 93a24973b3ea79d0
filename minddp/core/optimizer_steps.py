"""Calls around each step of any optimizer in this process, by one pair of torch's global hooks.

If each watcher had hooks of its own, they would have to be removed when it is garbage-collected. That may happen
while torch iterates over its hooks, which then raises an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepWatcher:
    """Called around each step, from `watch_steps` until `ignore_steps` or until it is collected."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def watch_steps(self) -> None:
        _watchers()[id(self)] = self

    def ignore_steps(self) -> None:
        _watchers().pop(id(self), None)


@functools.cache
def _watchers() -> weakref.WeakValueDictionary[int, StepWatcher]:
    """All watchers, in order of `watch_steps`. The first call installs the hooks for good."""
    watchers = weakref.WeakValueDictionary[int, StepWatcher]()

    def call_all(name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for reference in watchers.valuerefs():  # a copy: any watcher may be collected meanwhile
            if (watcher := reference()) is not None:
                getattr(watcher, name)(optimizer)

    register_optimizer_step_pre_hook(functools.partial(call_all, "before_step"))
    register_optimizer_step_post_hook(functools.partial(call_all, "after_step"))
    return watchers


def steps_on(optimizer: torch.optim.Optimizer, ids: Collection[int]) -> bool:
    """True if it steps one of the parameters that have these ids."""
    return any(id(param) in ids for group in optimizer.param_groups for param in group["params"])
