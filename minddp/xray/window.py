"""An x-ray of some steps in the middle of a loop, which only has to say which step comes next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel
from minddp.xray.sources import Source
from minddp.xray.xray import XRay

_log = logging.getLogger(__name__)


class Window:
    """Records the steps in `steps`, a range of numbers, of the loop within `with Window(...) as window`.

    When it is over, or the loop ends, it saves to `save_to` and calls `then`. A loop that never comes to the first
    step leaves a warning and nothing else.
    """

    def __init__(
        self,
        ddp: nn.Module | Source,
        steps: range,
        *,
        title: str | None = None,
        save_to: Sequence[Path] = (),
        then: Callable[[XRay], None] = lambda xray: None,
    ):
        self._steps, self._then = steps, then
        self._xray: XRay | None = XRay(ddp, title=title, first_step=steps.start, save_to=save_to)
        self._is_open = False

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def before_step(self, number: int) -> None:
        """Step `number` is about to begin, or goes on: to be told at each forward at least."""
        if self._xray is not None and not self._is_open and number in self._steps:
            self._is_open = True
            self._xray.start()
        elif self._is_open and number >= self._steps.stop:
            self.close()

    def close(self, error: BaseException | None = None) -> None:
        """There will be no more steps."""
        if self._xray is None:
            return
        if not self._is_open:
            _log.warning(
                "Steps %d:%d were never reached, so there is no x-ray.", self._steps.start, self._steps.stop
            )
            return
        xray, self._xray, self._is_open = self._xray, None, False
        xray.stop(error)
        if error is None:
            self._then(xray)


class FirstWrapper:
    """Waits for the first forward of any DistributedDataParallel in this process, and opens a `Window` on it.

    Steps are counted by synchronised forwards, from 0. `make_window` is given the module.
    """

    def __init__(self, make_window: Callable[[nn.Module], Window]):
        self._make_window = make_window
        self._window: Window | None = None
        self._synchronised = 0
        self._hook = register_module_forward_pre_hook(self._on_any_forward)

    def close(self, error: BaseException | None = None) -> None:
        """The program is over."""
        self._hook.remove()
        if self._window is not None:
            self._window.close(error)

    def _on_any_forward(self, module: nn.Module, _inputs: object) -> None:
        if isinstance(module, (DistributedDataParallel, TorchDDP)) and torch.is_grad_enabled():
            self._hook.remove()
            self._window = self._make_window(module)
            module.register_forward_pre_hook(self._on_forward, prepend=True)  # before those that already record
            self._count(module)

    def _on_forward(self, module: nn.Module, _inputs: object) -> None:
        assert self._window is not None
        if torch.is_grad_enabled():
            self._window.before_step(self._synchronised)
            self._count(module)

    def _count(self, module: nn.Module) -> None:
        self._synchronised += bool(getattr(module, "require_backward_grad_sync", True))
