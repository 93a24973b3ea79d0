"""A rank of `own_run.py`: run a script, record one step of it, and keep the values of its buckets."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from minddp import DistributedDataParallel
from minddp.core.events import Event, EventKind
from minddp.tools.xray.wrappers import Wrappers
from minddp.tools.xray.xray import XRay
from reference.interface import gradient


@dataclass
class OfBucket:
    """Of each parameter in a bucket: this rank's gradient, divided by the number of ranks, and the average."""

    before: list[Tensor]
    after: list[Tensor] = field(default_factory=list)


class Values:
    """The gradients of the last synchronised backward of the first DistributedDataParallel, on this rank.

    They are copied in the middle of backward, so the step that is recorded takes a little longer.
    """

    def __init__(self) -> None:
        self.of_bucket: dict[int, OfBucket] = {}
        self._ddp: Any = None
        self._watches = False
        register_module_module_registration_hook(self._on_registration)

    def _on_registration(self, module: nn.Module, name: str, submodule: object) -> None:
        """A wrapper assigns what it wraps while it is made."""
        if self._ddp is None and isinstance(module, DistributedDataParallel) and name == "module":
            self._ddp = module
            module.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, *_: object) -> None:
        if not self._watches:
            self._watches = True
            self._ddp._reducer.events.watch(self._on_event)

    def _on_event(self, event: Event) -> None:
        if event.kind in (EventKind.BUCKET_READY, EventKind.BUCKET_UNPACKED):
            bucket = self._ddp._reducer.store.all()[event.subject]
            if not bucket.spec.sparse:
                if event.kind is EventKind.BUCKET_READY:
                    self.of_bucket[event.subject] = OfBucket([view.detach().clone() for view in bucket.views])
                else:
                    self.of_bucket[event.subject].after = [gradient(param).clone() for param in bucket.params]

    def save(self, folder: str) -> None:
        """Keep what there is now, and copy no more."""
        self._ddp._reducer.events.unwatch(self._on_event)
        kept = {index: (of.before, of.after) for index, of in self.of_bucket.items()}
        torch.save(kept, Path(folder, f"values{dist.get_rank()}.pt"))

    @classmethod
    def load(cls, path: Path) -> Values:
        values = cls.__new__(cls)
        values.of_bucket = {index: OfBucket(*lists) for index, lists in torch.load(path).items()}
        return values


def values_in(folder: str, ranks: int) -> list[Values]:
    return [Values.load(Path(folder, f"values{rank}.pt")) for rank in range(ranks)]


def main(folder: str, step: str, script: str, *arguments: str) -> None:
    values = Values()

    def then(_xray: XRay) -> None:
        values.save(folder)

    title = os.path.basename(script)
    wrappers = Wrappers(range(int(step), int(step) + 1), title, [Path(folder, "step.json")], then)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    wrappers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
