"""One rank of `minddp xray`: run a training script or the demo model, and record some of its steps.

A script runs as `python script.py` would run it, with torch's DistributedDataParallel replaced by minddp's
(`--ddp torch` leaves it). Recorded is the first DistributedDataParallel that trains in this process, but not in
processes that the script starts itself. The demo model is recorded under both wrappers, one after the other.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.ddp import DistributedDataParallel
from minddp.train.settings import Settings, WrapperOptions
from minddp.train.trainer import Trainer
from minddp.train.world import World, open_world
from minddp.xray.command_line import parse
from minddp.xray.result import Result
from minddp.xray.xray import Window, XRay

TITLES = {"gpt": "A small GPT", "digits": "A small conv net"}


def main() -> None:
    options = parse(None)
    suffixes = [".html", ".json", *([".png"] if find_spec("matplotlib") else [])]
    files = [options.out / f"step{suffix}" for suffix in suffixes]
    if options.script:
        run_script(options, files)
    else:
        run_demo(options, files)


# ---------------------------------------------------------------------- a script


def run_script(options: argparse.Namespace, files: Sequence[Path]) -> None:
    script = Path(options.script)
    if options.ddp == "minddp":
        minddp.install()
    first = FirstWrapper(
        lambda ddp: Window(ddp, options.steps, title=script.name, save_to=files, then=XRay.explain)
    )
    sys.argv = [str(script), *options.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        first.close(error if failed else None)
        raise
    first.close()


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
            self._on_forward(module, _inputs)

    def _on_forward(self, module: nn.Module, _inputs: object) -> None:
        assert self._window is not None
        if torch.is_grad_enabled():
            self._window.before_step(self._synchronised)
            self._synchronised += bool(getattr(module, "require_backward_grad_sync", True))


# ---------------------------------------------------------------------- the demo model


def run_demo(options: argparse.Namespace, files: Sequence[Path]) -> None:
    wrapper = WrapperOptions(bucket_cap_mb=options.bucket_cap_mb)
    with open_world(Settings(task=options.task)) as world:
        ours = record(Settings(task=options.task, ddp="minddp", wrapper=wrapper), world, options.steps, files)
        theirs = record(Settings(task=options.task, ddp="torch", wrapper=wrapper), world, options.steps)
        ours.explain()
        for suffix in (".html", ".json"):
            ours.compare(theirs).save(options.out / f"compare{suffix}")


def record(settings: Settings, world: World, steps: range, save_to: Sequence[Path] = ()) -> Result:
    """Train up to the end of `steps`, and return their recording."""
    trainer = Trainer(settings, world)
    batches = iter(trainer.batches)
    x = XRay(trainer.ddp, title=TITLES[settings.task], first_step=steps.start, save_to=save_to)
    for _ in range(steps.start):
        trainer.optimizer_step(batches)
    with x:
        for _ in steps:
            trainer.optimizer_step(batches)
    return x.result


if __name__ == "__main__":
    main()
