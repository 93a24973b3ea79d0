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

MARK = "MINDDP_RANK_PROCESS"  # in the environment of what a rank starts
ADDRESS = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
FROM_LAUNCHER = {*ADDRESS, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


class TorchFinder:
    """Finds torch and minddp as the other finders do; has minddp installed when the import of torch is complete.

    It stays until then: looking for torch without importing it, as transformers and Accelerate do, calls it too. If
    a module of minddp is what imports torch, minddp is installed when the import of that module is complete.
    """

    def __init__(self, launched: dict[str, str] | None):
        self._launched = launched
        self._num_open = 0  # imports of torch or minddp that have begun and not ended
        self._torch_is_complete = False

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
        """Extend this loader, not its class: it must remain what `inspect` and `importlib.resources` expect."""
        exec_module = loader.exec_module

        def exec_and_install(module: Any) -> None:
            del loader.exec_module
            self._num_open += 1
            try:
                exec_module(module)
            finally:
                self._num_open -= 1
            self._torch_is_complete |= name == "torch"
            if self._torch_is_complete and self._num_open == 0 and self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                install(self._launched)

        loader.exec_module = exec_and_install


def install(launched: dict[str, str] | None) -> None:
    """Install minddp for the rest of this process; if it is a rank, with what its launcher has `launched`."""
    try:
        import minddp
    except ModuleNotFoundError as error:
        if error.name != "minddp":
            raise
        raise ImportError(
            f"minddp cannot be put in the place of torch's DistributedDataParallel: {sys.executable} finds torch "
            f"but not minddp. Install minddp there too."
        ) from None
    sys.excepthook = report_missing_cuda
    if "MINDDP_ON_CPU" in os.environ:
        from minddp.tools.launch import on_cpu

        on_cpu.install()
    if "MINDDP_NATIVE" not in os.environ:
        minddp.install()
    if setting := os.environ.get("MINDDP_XRAY"):
        from minddp.tools.xray.wrappers import record_process

        record_process(setting)
    if launched:
        from minddp.tools.watchdog.meeting import watch_meeting

        watch_meeting(launched)


def remember_launcher() -> dict[str, str] | None:
    """What torchrun's launcher has set for this rank; `None` in other processes, and in a rank's children."""
    if not os.environ.keys() >= FROM_LAUNCHER or MARK in os.environ:
        return None
    os.environ[MARK] = str(os.getpid())
    return {name: os.environ[name] for name in FROM_LAUNCHER}


def report_missing_cuda(kind: Any, error: Any, trace: Any) -> None:
    from minddp.tools.launch.cuda_missing import report

    report(kind, error, trace)


def run_hidden_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = hidden = module_from_spec(spec)
        spec.loader.exec_module(hidden)


if "torch" in sys.modules:  # a .pth file came first
    install(remember_launcher())
else:
    sys.meta_path.insert(0, TorchFinder(remember_launcher()))  # type: ignore[arg-type]
run_hidden_sitecustomize()
