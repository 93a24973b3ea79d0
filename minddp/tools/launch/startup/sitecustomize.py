"""Python's `site` module imports this file at the start of each process below `minddp run` or `exec`.

They put this folder first on PYTHONPATH. It installs minddp when the process imports torch, in the ranks and in all
processes that they start. It imports nothing of minddp before torch, takes this folder off `sys.path`, and runs the
`sitecustomize` it hides.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from typing import Any


class TorchFinder:
    """Installs minddp after the import of torch, or of a module of minddp that imports torch.

    It stays until then, since transformers and Accelerate look for torch without importing it.
    """

    def __init__(self) -> None:
        self._num_open = 0  # imports of torch or minddp that have begun and not ended

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" and name.partition(".")[0] != "minddp":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._install_after(spec.loader, name)
        return spec

    def _install_after(self, loader: Any, name: str) -> None:
        """Extend this loader, not its class: `inspect` and `importlib.resources` depend on the class."""
        exec_module = loader.exec_module

        def exec_and_install(module: Any) -> None:
            del loader.exec_module
            self._num_open += 1
            try:
                exec_module(module)
            finally:
                self._num_open -= 1
            if self._num_open == 0 and "torch" in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                install()

        loader.exec_module = exec_and_install


def install() -> None:
    """Install minddp for the rest of this process."""
    import minddp

    if "MINDDP_ON_CPU" in os.environ:
        from minddp.tools.launch import on_cpu

        on_cpu.install()
    if "MINDDP_BACKEND" in os.environ:
        from minddp.tools.launch import backend

        backend.install()
    if "MINDDP_NATIVE" not in os.environ:
        minddp.install()
    if settings := os.environ.get("MINDDP_WATCH"):
        from minddp.tools.watchdog.watch import Watch

        Watch(**json.loads(settings), finds_modules=True)
    if setting := os.environ.get("MINDDP_XRAY"):
        from minddp.tools.xray.wrappers import record_process

        record_process(setting)
    if setting := os.environ.get("MINDDP_AUDIT"):
        from minddp.tools.audit.auditing import audit_process

        audit_process(setting)


def run_hidden_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = hidden = module_from_spec(spec)
        spec.loader.exec_module(hidden)


if "torch" in sys.modules:  # imported by a .pth file
    install()
else:
    sys.meta_path.insert(0, TorchFinder())  # type: ignore[arg-type]
run_hidden_sitecustomize()
