"""The wrapped module of a process: find it, and record some of its steps.

Under `minddp xray`, `run --xray DIR` and `exec --xray DIR`, each process looks for it once it has imported torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel
from minddp.tools.xray.analysis import NoStep
from minddp.tools.xray.xray import XRay

_log = logging.getLogger(__name__)


def record_process(setting: str) -> None:
    """Record this process: `setting` is FIRST:LAST:FOLDER."""
    first, last, folder = setting.split(":", 2)
    title = os.path.basename(sys.argv[0])
    files = [Path(folder, "step.html"), Path(folder, "step.json")]
    Wrappers(range(int(first), int(last)), title, files)


class Wrappers:
    """Records `steps` of the first DistributedDataParallel that trains in this process.

    Steps are counted from 0, by synchronised backwards. After `steps` the recording is saved to `files`, and `then`
    is called.
    """

    def __init__(
        self,
        steps: range,
        title: str,
        files: Sequence[Path],
        then: Callable[[XRay], None] = XRay.explain,
    ):
        self._range, self._title, self._files, self._then = steps, title, files, then
        self._state: Literal["before", "open", "over"] = "before"
        # The module that trains
        self._module: Any = None
        self._xray: XRay | None = None
        self._has_others = False  # that train
        self._hooks = [register_module_module_registration_hook(self._on_registration)]

    def close(self, error: BaseException | None = None) -> None:
        """The program is over, with an error, if it ends by one. Does nothing the second time."""
        if not self._hooks:
            return
        while self._hooks:
            self._hooks.pop().remove()
        if self._xray is not None:
            self._end(self._xray, error)
        elif error is None:
            _log.warning("No DistributedDataParallel was called with gradients in this process: there is no x-ray.")

    def _on_registration(self, module: nn.Module, name: str, _submodule: object) -> None:
        """The constructor of a wrapper assigns the module that it wraps."""
        if isinstance(module, (DistributedDataParallel, TorchDDP)) and name == "module":
            if len(self._hooks) == 1:  # `atexit` is not for processes that are forked
                Finalize(None, lambda: self.close(getattr(sys, "last_value", None)), exitpriority=0)
            self._hooks.append(module.register_forward_pre_hook(self._on_forward, prepend=True))

    def _on_forward(self, module: nn.Module, _inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._xray is None:
            self._module = module
            self._xray = XRay(module, title=self._title)
        if module is not self._module:
            if not self._has_others:
                self._has_others = True
                first = type(self._module.module).__name__
                _log.warning("Several modules train: x-ray records the first, %s.", first)
            return
        step = self._xray.source.steps_taken
        if self._state == "before" and step in self._range:
            self._state = "open"
            self._xray.start()
        elif self._state == "open" and step >= self._range.stop:
            self._end(self._xray)

    def _end(self, xray: XRay, error: BaseException | None = None) -> None:
        state, self._state = self._state, "over"
        if state == "before":
            steps = f"{self._range.start}:{self._range.stop}"
            _log.warning("Steps %s were never reached, so there is no x-ray.", steps)
        if state == "open":
            try:
                xray.stop(error)
                if error is None:
                    for path in self._files:
                        xray.save(path)
                    self._then(xray)
            except NoStep as problem:
                _log.warning("%s", problem)
