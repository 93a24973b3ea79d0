"""`minddp.watch`: the checks of minddp's wrapper, for a process that uses another class, or none.

    minddp watch train.py                 # torchrun's options; the script is not changed
    minddp exec --watch -- any launcher
    minddp.watch(module_or_ddp)           # in a script

Under the commands a guard (`observer.py`) is attached to the module that an optimizer trains, when it steps for
the first time, or to torch's wrapper in its first forward. A thread sees when the process waits for other ranks
(`process_monitor.py`). Nothing else is computed or communicated, and `close` undoes all of it. minddp's own wrapper
has a guard, and its waits are watched, with or without this.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
import weakref
from dataclasses import asdict
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
from minddp.tools.watchdog.observer import StepGuard, WrapperGuard, guarding_wrappers, module_of
from minddp.tools.watchdog.process_monitor import ProcessMonitor
from minddp.tools.watchdog.rank_state import RankState


class TrainingGoesWrong(RuntimeError):
    """`raises`: the first finding, raised on rank 0 before an optimizer's next step."""


def watch(module: nn.Module, **settings: Any) -> Watch:
    """Warn of silent problems of a training, once for each and on rank 0. Call it on all ranks.

    Args:
        module: a wrapper of minddp or torch, FSDP2, or any other module.
        settings: of `Watch`, in the first call; further calls add modules to it.

    Raises:
        TypeError: not a module, nothing that requires grad, or an unknown setting.
        ValueError: a wrapper of minddp whose guard is switched off.
        RuntimeError: there is no process group, or settings in a further call.
    """
    if not isinstance(module, nn.Module) or not any(param.requires_grad for param in module.parameters()):
        raise TypeError(f"watch() takes a module with parameters that require grad, not {type(module).__name__}.")
    if isinstance(module, DistributedDataParallel) and getattr(module, "guard", None) is None:
        raise ValueError("This wrapper has no guard: leave `on_drift=None` out.")
    if not dist.is_initialized():
        raise RuntimeError("watch() compares ranks: call init_process_group first.")
    if _current() and settings:
        raise RuntimeError("This process is watched already: close that Watch before you give other settings.")
    current = _current()[0] if _current() else Watch(**settings)
    current.add(module)
    return current


@functools.cache
def _current() -> list[Watch]:
    """The one of this process that is open, if any."""
    return []


class Watch(StepWatcher):
    """Watches this process until `close`.

    Args:
        stuck_after_s: time to wait for other ranks before a diagnosis.
        raises: end the training at the first problem.
        json: a file to which each problem is appended, as a line.
        finds_modules: find what trains, besides the modules that are given.
    """

    def __init__(
        self,
        stuck_after_s: float = 7.0,
        raises: bool = False,
        json: str | None = None,
        finds_modules: bool = False,
    ):
        self._guards = weakref.WeakKeyDictionary[nn.Module, Any]()
        self._raises, self._finds_modules = raises, finds_modules
        self._known: set[int] = set()  # ids of parameters that an optimizer has stepped
        self._outlet = Outlet(json)
        self._undo = guarding_wrappers(self._guard_of)
        self._undo.callback(ProcessMonitor(stuck_after_s, self._state, self._end_process).close)
        self.watch_steps()
        _current().append(self)

    @property
    def findings(self) -> list[Finding]:
        """All of this process, so far."""
        return self._outlet.findings

    def close(self) -> None:
        """Compare the last notes, and leave nothing behind."""
        self.ignore_steps()
        self._undo.close()
        for guard in self._guards.values():
            guard.close()
        self._guards.clear()
        self._outlet.close()
        _current().clear()

    def add(self, module: nn.Module) -> None:
        """Watch `module`, too."""
        if module in self._guards or isinstance(module, DistributedDataParallel):
            return
        if isinstance(module, TorchDDP) and module.process_group.size() > 1 and not module._use_python_reducer:
            skip_our_files()
            self._guards[module] = WrapperGuard(module)
        elif not isinstance(module, TorchDDP) and dist.get_world_size() > 1:
            self._guards[module] = StepGuard(module)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._raises and self.findings:
            raise TrainingGoesWrong(self.findings[0].text)
        param = next((param for group in optimizer.param_groups for param in group["params"]), None)
        if self._finds_modules and id(param) not in self._known and dist.is_initialized():
            self._known.add(id(param))
            is_guarded = any(guard.looks_at(optimizer) for guard in self._guards.values())
            if not is_guarded and (module := module_of([optimizer])) is not None:
                self.add(module)

    def _guard_of(self, ddp: TorchDDP) -> WrapperGuard | None:
        """Called in each forward."""
        if self._finds_modules and ddp not in self._guards:
            self.add(ddp)
        return self._guards.get(ddp)

    def _state(self) -> RankState:
        """Of the module that is in a step, or has made most."""
        modules = [module for ref in self._guards.keyrefs() if (module := ref()) is not None]  # a copy
        states = [self._guards[module].state() for module in modules]
        return max(states, default=RankState(), key=lambda state: (state.phase != "IDLE", state.backward))

    def _end_process(self) -> None:
        """No exception reaches a main thread that waits in torch."""
        if self._raises:
            logging.shutdown()
            os._exit(1)


class Outlet(logging.Handler):
    """Keeps findings, appends them and diagnoses to `file`, and prints what no other handler does."""

    def __init__(self, file: str | None):
        super().__init__(logging.WARNING)
        if file is not None:
            Path(file).open("a").close()  # an error now rather than at the first finding
        self._file = file
        self.findings: list[Finding] = []
        logging.getLogger("minddp.tools.watchdog").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        finding: Finding | None = getattr(record, "finding", None)
        if logging.lastResort is not None and not logging.getLogger().handlers:  # for which it is not called now
            logging.lastResort.handle(record)
        if self._file is not None:
            line = {"check": "stuck", "text": record.getMessage()} if finding is None else asdict(finding)
            with Path(self._file).open("a") as file:
                file.write(json.dumps({"time": time.time(), **line}) + "\n")
        if finding is not None:  # last: it may end the training
            self.findings.append(finding)

    def close(self) -> None:
        logging.getLogger("minddp.tools.watchdog").removeHandler(self)
        super().close()
