"""`with minddp.xray(ddp) as x:` records the steps inside; afterwards `x` saves, explains and compares them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel
from minddp.tools.xray.peers import Peers
from minddp.tools.xray.record import CAPACITY, Recorder
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import Comparison, Result
from minddp.tools.xray.sources import MinddpSource, NativeSource, Source

_log = logging.getLogger(__name__)
LIMIT_S = 30.0


class XRay(Comparison):
    """A recording, and its `result` when it is over.

    Any ranks may record, one or all; the first of them gathers the recordings at the end. See
    [Note: which ranks record].

    Args:
        ddp: minddp's wrapper; torch's, as far as it can be watched (see `sources.py`); or a `Source`. Several that
            train together, by name: `minddp.xray({"actor": actor, "critic": critic})`.
        title: its name in pictures; by default the module's class.
        capacity: the number of events to keep, the latest; all pictures show how many were dropped.
        first_step: the number of the first step recorded; by default the number of synchronised backwards before.
        save_to: files to save at the end. If an exception ends the recording, each rank saves its own events up to
            then, and the files' names have its number.
        limit_s: how long to wait at the end for other ranks that record.
    """

    def __init__(
        self,
        ddp: nn.Module | Source | Mapping[str, nn.Module | Source],
        *,
        title: str | None = None,
        capacity: int = CAPACITY,
        first_step: int | None = None,
        save_to: str | Path | Sequence[str | Path] = (),
        limit_s: float = LIMIT_S,
    ):
        (name, first), *others = ddp.items() if isinstance(ddp, Mapping) else [("", ddp)]
        # The wrappers and their names; those whose process group has other ranks are left out
        self._source = source_of(first)
        self._sources = [self._source]
        self._modules = [name or f"{self._source.title} #1"]
        self._left_out: list[str] = []
        # The recording under way, and its result
        self._new_recorder = partial(Recorder, capacity=capacity, first_step=first_step)
        self._recorder: Recorder | None = None
        self._result: Result | None = None
        for name, other in others:
            self.add(other, name)
        self._title = title or self._source.title
        self._save_to = [save_to] if isinstance(save_to, (str, Path)) else list(save_to)
        self._limit_s = limit_s

    def __enter__(self) -> XRay:
        self.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop(error)

    def add(self, ddp: nn.Module | Source, name: str = "") -> None:
        """Record another wrapper that trains together with the first. All ranks add wrappers in the same order."""
        source = source_of(ddp)
        number = 1 + len(self._modules) + len(self._left_out)
        name = name if name and name not in self._modules else f"{source.title} #{number}"
        if (source.rank, source.world_size) == (self._source.rank, self._source.world_size):
            self._modules.append(name)
            self._sources.append(source)
            if self._recorder is not None:
                self._recorder.add(source)
        else:
            self._left_out.append(name)

    def start(self) -> None:
        """Record from now on. Call it between two steps, so that the first one is whole."""
        self._result = None
        self._peers = Peers(self._source, self._limit_s)
        self._recorder = self._new_recorder(*self._sources)

    def stop(self, error: BaseException | None = None) -> None:
        """End the recording, gather the recordings of all ranks unless an `error` ends it, and save."""
        assert self._recorder is not None, "start() comes before stop()"
        ours = self._recorder.stop(error, self._modules if len(self._modules) > 1 else ())
        self._recorder = None
        if error is None:
            ranks, notes, is_first = self._peers.gather(ours)
        else:
            self._peers.leave()
            alone = f"Rank {ours.rank} alone, since an exception ended the recording."
            ranks, notes, is_first = (ours,), (alone,), True
        left_out = [f"{name} is not recorded: its process group has other ranks." for name in self._left_out]
        source = self._source
        recording = Recording(self._title, ranks, source.wrapper, (*notes, *left_out), source.has_plan)
        self._result = Result(recording, is_first=is_first)
        for path in map(Path, self._save_to):
            if error is None:
                self.save(path)
            else:
                self._save_alone(path.with_name(f"{path.stem}.rank{ours.rank}{path.suffix}"))

    def _save_alone(self, path: Path) -> None:
        try:
            self.save(path)
            _log.warning("Saved the recording up to the exception: %s", path)
        except Exception as failure:  # the exception that ended the recording matters more
            _log.warning("Could not save %s: %s", path, failure)

    @property
    def result(self) -> Result:
        """The recording.

        Raises:
            RuntimeError: it is not over.
        """
        if self._result is None:
            raise RuntimeError(
                "This x-ray has not ended yet: use its result after the `with` block, or after stop()."
            )
        return self._result

    @property
    def results(self) -> tuple[Result, ...]:
        return (self.result,)


def source_of(ddp: Any) -> Source:
    """The source of events of a wrapper; a source is returned unchanged.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(ddp, DistributedDataParallel):
        return MinddpSource(ddp)
    if isinstance(ddp, TorchDDP):
        return NativeSource.of(ddp)
    if all(hasattr(ddp, name) for name in ("watch", "unwatch", "plan", "topic")):
        return ddp
    raise TypeError(
        f"minddp.xray records a DistributedDataParallel, minddp's or torch's, but got {type(ddp).__name__}. "
        f"Wrap the module first."
    )
