"""All wrapped modules of a process: find them, name them, and record some of their steps.

Under `minddp xray`, `run --xray DIR` and `exec --xray DIR`, each process looks for them once it has imported torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_post_hook

from minddp.ddp import DistributedDataParallel
from minddp.platform.wording import count
from minddp.tools.xray.analysis import NoStep
from minddp.tools.xray.sources import Source
from minddp.tools.xray.xray import XRay, source_of

_log = logging.getLogger(__name__)
RANK_PROCESS = "MINDDP_RANK_PROCESS"  # a rank's process number: see `tools/launch/startup/sitecustomize.py`


def record_process(setting: str) -> None:
    """Record this process: `setting` is FIRST:LAST:FOLDER."""
    first, last, folder = setting.split(":", 2)
    title = os.path.basename(sys.argv[0])
    files = [Path(folder, "step.html"), Path(folder, "step.json")]
    wrappers = Wrappers(range(int(first), int(last)), title, files, closes_at_exit=True)
    if os.environ.get(RANK_PROCESS) == str(os.getpid()):
        wrappers.close_at_exit()


class _Begin(NamedTuple):
    """The begin of the present step: its number, and the backwards and steps of optimizers before it."""

    number: int = -1
    backwards: Mapping[nn.Module, int] = {}
    optimizer_steps: int = 0


class Wrappers:
    """Records `steps` of every DistributedDataParallel that trains in this process from now on, or that is added.

    Steps are counted from 0: those of one module by its synchronised forwards. With several modules, a step begins
    with a forward of the first one that trained, if since the last step began an optimizer has stepped and each
    module that trains has ended a synchronised backward. After `steps` the recording is saved to `files`, and
    `then` is called.
    """

    def __init__(
        self,
        steps: range,
        title: str,
        files: Sequence[Path],
        then: Callable[[XRay], None] = XRay.explain,
        *,
        closes_at_exit: bool = False,
    ):
        self._closes_at_exit = closes_at_exit
        self._record = partial(XRay, title=title, first_step=steps.start, save_to=files)
        self._range, self._then = steps, then
        self._state: Literal["before", "open", "over"] = "before"
        self._xray: XRay | None = None
        # The modules that train
        self._sources: dict[nn.Module, Source] = {}
        self._names: dict[nn.Module, str] = {}
        self._forwards: Counter[nn.Module] = Counter()
        self._made: list[str] = []  # the classes of all modules that were wrapped
        # The present step
        self._begin = _Begin()
        self._was_synchronised = True
        self._optimizer_steps = 0
        self._hooks = [
            register_module_module_registration_hook(self._on_registration),
            register_optimizer_step_post_hook(self._on_optimizer),
        ]

    def close(self, error: BaseException | None = None) -> None:
        """The program is over."""
        for hook in self._hooks:
            hook.remove()
        if self._xray is not None:
            self._end(self._xray, error)
        elif error is None:
            made = ", ".join(self._made)
            what = f"{made}: made, but never called with gradients enabled" if made else "none was made"
            _log.warning("No DistributedDataParallel trained in this process (%s), so there is no x-ray.", what)

    def close_at_exit(self) -> None:
        """Close at the end of the process; with an error, if it ends by one. Does nothing the second time."""
        if self._closes_at_exit:
            self._closes_at_exit = False
            # `atexit` is not for processes that are forked.
            Finalize(None, lambda: self.close(getattr(sys, "last_value", None)), exitpriority=0)

    def before_step(self, number: int) -> None:
        """Step `number` is about to begin, or continues. For a loop that counts its steps and adds its modules."""
        assert self._xray is not None
        if self._state == "before" and number in self._range:
            self._state = "open"
            self._xray.start()
        elif self._state == "open" and number >= self._range.stop:
            self._end(self._xray)

    def _end(self, xray: XRay, error: BaseException | None = None) -> None:
        state, self._state = self._state, "over"
        if state == "before":
            self._warn("were never reached")
        elif state == "open":
            try:
                xray.stop(error)
                if error is None:
                    self._then(xray)
            except NoStep:
                self._warn("saw no synchronised backward begin")

    def _warn(self, what: str) -> None:
        """Say that no step was recorded, and what each module that trains has done so far on this rank."""
        seen = "; ".join(
            f"{self._names[module]}: {count(self._forwards[module], 'forward')} with gradients enabled, "
            f"{count(source.steps_taken, 'synchronised backward')}"
            for module, source in self._sources.items()
        )
        rank = next(iter(self._sources.values())).rank
        details = f" Rank {rank} saw {seen}; {count(self._optimizer_steps, 'step')} of optimizers."
        which = f"{self._range.start}:{self._range.stop}"
        _log.warning("Steps %s %s, so there is no x-ray.%s", which, what, details if self._made else "")

    def _on_registration(self, module: nn.Module, name: str, submodule: object) -> None:
        """The constructor of a wrapper assigns the module that it wraps."""
        if isinstance(module, (DistributedDataParallel, TorchDDP)) and name == "module":
            self._made.append(type(submodule).__name__)
            self.close_at_exit()
            self._hooks.append(module.register_forward_pre_hook(self._on_forward, prepend=True))

    def _on_optimizer(self, *_: object) -> None:
        self._optimizer_steps += 1

    def _on_forward(self, module: nn.Module, _inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if module not in self._sources:
            self.add(module)
        if self._begins_step(module):
            taken = {known: source.steps_taken for known, source in self._sources.items()}
            self._begin = _Begin(self._begin.number + 1, taken, self._optimizer_steps)
        self.before_step(self._begin.number)
        self._forwards[module] += 1
        self._was_synchronised = bool(getattr(module, "require_backward_grad_sync", True))

    def add(self, module: nn.Module) -> None:
        self._sources[module] = source = source_of(module)
        name = name_in_script(module)
        self._names[module] = name or source.title
        if self._xray is None:
            self._xray = self._record({name: source})
        else:
            self._xray.add(source, name)

    def _begins_step(self, module: nn.Module) -> bool:
        if len(self._sources) == 1:
            return self._was_synchronised
        taken = {known: source.steps_taken for known, source in self._sources.items()}
        return (
            module is next(iter(self._sources))
            and (self._optimizer_steps > self._begin.optimizer_steps or not self._optimizer_steps)
            and all(number > self._begin.backwards.get(known, 0) for known, number in taken.items() if number)
        )


def name_in_script(module: nn.Module) -> str:
    """The variable, or attribute of an object's, that holds the module where it is called; else empty."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "minddp"):
            continue
        spaces = [frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {}), frame.f_globals]
        for name, value in [item for space in spaces for item in space.items()]:
            if value is module:
                return name
    return ""
