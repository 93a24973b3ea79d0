"""Run at the start of each Python process below `minddp run` or `exec`: install minddp once torch is imported.

They put this folder first on PYTHONPATH, and Python's `site` module imports the first `sitecustomize` it finds: in
the ranks, and in the processes that they start. Forked children have inherited the effect.

Unlike all other modules of minddp this one acts when it is imported, that being what it is for. Any Python process
may meet it, so it imports nothing of minddp before torch is there, takes this folder off `sys.path`, and runs the
`sitecustomize` that it has hidden.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from typing import Any


class TorchFinder:
    """Finds torch as the other finders do, and has minddp installed when its import is complete.

    It stays until then: looking for torch without importing it, as transformers and Accelerate do, calls it too.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._install_after(spec.loader)
        return spec

    def _install_after(self, loader: Any) -> None:
        """Extend this loader, not its class: it must remain what `inspect` and `importlib.resources` expect."""
        exec_module = loader.exec_module

        def exec_and_install(module: Any) -> None:
            del loader.exec_module
            exec_module(module)
            sys.meta_path.remove(self)
            install()

        loader.exec_module = exec_and_install


def install() -> None:
    """Install minddp for the rest of this process."""
    try:
        import minddp
    except ModuleNotFoundError as error:
        if error.name != "minddp":
            raise
        raise ImportError(
            f"minddp cannot be put in the place of torch's DistributedDataParallel: {sys.executable} finds torch "
            f"but not minddp. Install minddp there too."
        ) from None
    minddp.install()


def run_hidden_sitecustomize() -> None:
    """Run what Python would have run at its start, had this folder not been there."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = hidden = module_from_spec(spec)
        spec.loader.exec_module(hidden)


if "torch" in sys.modules:  # a .pth file came first
    install()
else:
    sys.meta_path.insert(0, TorchFinder())  # type: ignore[arg-type]
run_hidden_sitecustomize()
