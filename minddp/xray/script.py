"""One rank of `minddp xray script.py`: run a training script, and record some of its steps.

The script runs as `python script.py` would run it, with torch's DistributedDataParallel replaced by minddp's
(`--ddp torch` leaves it). Recorded is the first DistributedDataParallel that trains in this process, but not in
processes that the script starts itself.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel
from minddp.xray.command_line import files_in, parse
from minddp.xray.xray import Window, XRay


class FirstWrapper:
    """Waits for the first forward of any DistributedDataParallel in this process, and opens a `Window` on it.

    Steps are counted by synchronised forwards, from 0. `make_window` gets the module.
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


def main() -> None:
    options = parse(None)
    script = Path(options.script)
    if options.ddp == "minddp":
        import minddp

        minddp.install()

    def make_window(ddp: nn.Module) -> Window:
        return Window(ddp, options.steps, title=script.name, save_to=files_in(options.out), then=XRay.explain)

    first = FirstWrapper(make_window)
    sys.argv = [str(script), *options.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        first.close(error if failed else None)
        raise
    first.close()


if __name__ == "__main__":
    main()
