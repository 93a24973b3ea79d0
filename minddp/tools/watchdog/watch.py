"""`minddp.watch`: the checks of minddp's wrapper, for a process that uses another class, or none.

    minddp watch train.py                 # torchrun's options; the script is not changed
    minddp exec --watch -- any launcher
    minddp.watch(module_or_ddp)           # in a script

A `Watch` sees each step of an optimizer. Under the commands it attaches an observer (`observer.py`) to the module that
an optimizer trains, when it steps for the first time, or to torch's wrapper in its first forward. A thread sees when the
process waits for other ranks (`process_monitor.py`). Nothing is computed or communicated otherwise, and `close` undoes
all of it. minddp's own wrapper has its guard, and its waits are watched, with or without this.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from minddp.compat.compiled import skip_our_files
from minddp.core.optimizer_steps import StepWatcher
from minddp.ddp import DistributedDataParallel
from minddp.tools.watchdog.check import Finding
from minddp.tools.watchdog.guard import Guarded
from minddp.tools.watchdog.observer import (
    Observer,
    StepObserver,
    WrapperObserver,
    module_of,
    observing_wrappers,
)
from minddp.tools.watchdog.process_monitor import ProcessMonitor
from minddp.tools.watchdog.rank_state import RankState


class TrainingGoesWrong(RuntimeError):
    """`raises`: the first finding, raised on the rank that reports it when an optimizer steps next."""


@dataclass(frozen=True)
class WatchSettings:
    """How to watch a process.

    `stuck_after_s`: see `minddp.DistributedDataParallel`; `None` makes no diagnosis of waits. `raises`: end the
    training at the first finding. `json`: a file to which each finding is appended as a line. `finds_modules`: look
    for modules that train, besides those that are given.
    """

    stuck_after_s: float | None = 10.0
    raises: bool = False
    json: str | None = None
    finds_modules: bool = False


def watch(module: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> Watch:
    """Warn of silent problems of a training by `module`: a wrapper of minddp or torch, FSDP2, or any other module.

    Call it on all ranks, after the module has been wrapped. Rank 0 logs a warning once for each problem. Calls for
    further modules go on with the first one's settings.

    Args:
        optimizer: if several step the module's parameters, the one whose steps count.
        settings: see `WatchSettings`.

    Raises:
        TypeError: not a module, an unknown setting, or nothing that requires grad.
        ValueError: other settings than those of an earlier call.
        RuntimeError: there is no process group yet.
    """
    if not isinstance(module, nn.Module) or not any(param.requires_grad for param in module.parameters()):
        raise TypeError(f"watch() takes a module with parameters that require grad, but got {type(module).__name__}.")
    if not dist.is_initialized():
        raise RuntimeError("watch() compares ranks: call init_process_group first.")
    current = _current()
    if not current:
        Watch(WatchSettings(**settings))
    elif settings and WatchSettings(**settings) != current[0].settings:
        raise ValueError(f"This process is watched already, with {current[0].settings}. Close that Watch first.")
    current[0].add(module, optimizer)
    return current[0]


@functools.cache
def _current() -> list[Watch]:
    """The one that is open, if any."""
    return []


def watch_process(settings: str) -> None:
    """Watch what trains in this process, by the settings that a command has passed as JSON."""
    Watch(WatchSettings(**{**json.loads(settings), "finds_modules": True}))


class Watch(StepWatcher):
    """Watches this process until `close`. See `watch`."""

    def __init__(self, settings: WatchSettings):
        self.settings = settings
        self._observers = weakref.WeakKeyDictionary[nn.Module, Observer]()
        self._own = weakref.WeakSet[DistributedDataParallel]()  # wrappers of minddp, with a guard of their own
        self._known: set[int] = set()  # ids of parameters that an optimizer has stepped
        self._outlet = Outlet(settings)
        logging.getLogger("minddp.tools.watchdog").addHandler(self._outlet)
        self._undo = observing_wrappers(self._observer_of)
        limit_s = settings.stuck_after_s
        self._monitor = limit_s and ProcessMonitor(limit_s, self._state, self._end_process)
        self.watch_steps()
        _current().append(self)

    @property
    def findings(self) -> list[Finding]:
        """All so far, on rank 0."""
        guards = [observer.guard for observer in self._observers.values()]
        guards += [ddp.guard for ddp in self._own]  # type: ignore[attr-defined]
        return [finding for guard in guards for finding in guard.findings]

    def close(self) -> None:
        """Compare the last notes, and leave nothing behind."""
        self.ignore_steps()
        self._undo.close()
        if self._monitor:
            self._monitor.close()
        for observer in self._observers.values():
            observer.guard.close()
        self._observers.clear()
        logging.getLogger("minddp.tools.watchdog").removeHandler(self._outlet)
        with suppress(ValueError):
            _current().remove(self)

    def add(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Watch `module`, too."""
        if isinstance(module, DistributedDataParallel):
            if not any(isinstance(extension, Guarded) for extension in module.extensions):
                guarded = Guarded(shares=False)
                module.extensions += (guarded,)
                guarded.attach(module, starts_equal=False)
            self._own.add(module)
            return
        if module not in self._observers and dist.is_initialized():
            is_wrapper = isinstance(module, TorchDDP)
            group: Any = module.process_group if is_wrapper else dist.group.WORLD
            if group.size() > 1:
                if is_wrapper and not module._use_python_reducer:
                    skip_our_files()
                self._observers[module] = WrapperObserver(module) if is_wrapper else StepObserver(module)
        if module in self._observers and optimizer is not None:
            self._observers[module].guard.counts_steps_of(optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._outlet.reason:
            raise TrainingGoesWrong(self._outlet.reason)
        param = next((param for group in optimizer.param_groups for param in group["params"]), None)
        if not self.settings.finds_modules or param is None or id(param) in self._known:
            return
        if dist.is_initialized():
            self._known.add(id(param))
            is_seen = any(known is param for observer in self._observers.values() for _, known in observer.params)
            if not is_seen and (module := module_of(optimizer)) is not None:
                self.add(module)

    def _observer_of(self, ddp: TorchDDP) -> WrapperObserver | None:
        """Called in each forward."""
        if ddp not in self._observers and self.settings.finds_modules:
            self.add(ddp)
        return self._observers.get(ddp)  # type: ignore[return-value]

    def _state(self) -> RankState:
        """Of the module that is in a step, or has made the most."""
        states = [observer.state() for observer in self._observers.values()]
        return max(states, default=RankState(), key=lambda state: (state.phase != "IDLE", state.backward))

    def _end_process(self) -> None:
        """The main thread waits in torch, where no exception reaches it."""
        if self.settings.raises:
            logging.shutdown()
            os._exit(1)


class Outlet(logging.Handler):
    """Appends what is logged to the file of the settings, and keeps the first text if findings are to raise."""

    def __init__(self, settings: WatchSettings):
        super().__init__(logging.WARNING)
        self._settings = settings
        self.reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        finding: Finding | None = getattr(record, "finding", None)
        if self._settings.raises and finding is not None:
            self.reason = self.reason or finding.text
        if self._settings.json is not None:
            line = asdict(finding) if finding is not None else {"check": "stuck", "text": record.getMessage()}
            with Path(self._settings.json).open("a") as file:
                file.write(json.dumps({"time": time.time(), **line}) + "\n")
