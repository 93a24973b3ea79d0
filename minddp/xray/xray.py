"""`with minddp.xray(ddp) as x:` records the steps inside; afterwards `x` saves, explains and compares them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel
from minddp.xray.native import NativeSource
from minddp.xray.peers import Gathered, Peers
from minddp.xray.record import CAPACITY, Recorder
from minddp.xray.recording import Recording
from minddp.xray.result import Comparison, Result
from minddp.xray.sources import MinddpSource, Source

_log = logging.getLogger(__name__)
LIMIT_S = 30.0


class XRay:
    """A recording under way, and its `result` when it is over.

    Any ranks may record, one or all; those that do come together at the end, on the first of them. See
    [Note: who records].

    Args:
        ddp: minddp's wrapper; torch's, as far as it can be watched (see `native.py`); or a `Source`.
        title: what it is called in pictures; by default the module's class.
        capacity: how many events are kept, the latest; how many were dropped is told in every picture.
        first_step: the number of the first step recorded; by default how many synchronised backwards came before.
        save_to: files to save at the end, also if an exception ends it: then up to that, for this rank alone, and
            with the rank in the files' names.
        limit_s: how long to wait at the end for other ranks that record.
    """

    def __init__(
        self,
        ddp: nn.Module | Source,
        *,
        title: str | None = None,
        capacity: int = CAPACITY,
        first_step: int | None = None,
        save_to: str | Path | Sequence[str | Path] = (),
        limit_s: float = LIMIT_S,
    ):
        self._source = source_of(ddp)
        self._title = title or self._source.title
        self._recorder = Recorder(self._source, capacity, first_step)
        self._save_to = [save_to] if isinstance(save_to, (str, Path)) else list(save_to)
        self._limit_s = limit_s
        self._result: Result | None = None

    def __enter__(self) -> XRay:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)

    def start(self) -> None:
        """Record from now on. Between two steps, so that the first one is whole."""
        source = self._source
        self._result = None
        self._peers = Peers(source.store, source.topic, source.rank, source.world_size, self._limit_s)
        self._recorder.start()

    def stop(self, error: BaseException | None = None) -> None:
        """End the recording and bring the ranks' parts together, unless an `error` ends it."""
        ours = self._recorder.stop(error)
        if error is None:
            gathered = self._peers.gather(ours)
        else:
            self._peers.leave()
            gathered = Gathered(
                (ours,), (f"Rank {ours.rank} alone, since an exception ended the recording.",), True
            )
        recording = Recording(
            self._title, gathered.ranks, self._source.wrapper, gathered.notes, self._source.has_plan
        )
        self._result = Result(recording, is_first=gathered.is_first)
        for path in self._save_to:
            self._save(Path(path), error)

    def _save(self, path: Path, error: BaseException | None) -> None:
        if error is None:
            self.result.save(path)
            return
        own = path.with_name(f"{path.stem}.rank{self._source.rank}{path.suffix}")
        try:
            self.result.save(own)
            _log.warning("Saved what was recorded before the exception: %s", own)
        except Exception as failure:  # the exception that is on its way matters more
            _log.warning("Could not save %s: %s", own, failure)

    @property
    def result(self) -> Result:
        """What was recorded.

        Raises:
            RuntimeError: the recording is not over.
        """
        if self._result is None:
            raise RuntimeError(
                "This x-ray has not ended yet: use its result after the `with` block, or after stop()."
            )
        return self._result

    def save(self, path: str | Path) -> None:
        """See `Result.save`."""
        self.result.save(path)

    def explain(self, console: Console | None = None) -> None:
        """See `Result.explain`."""
        self.result.explain(console)

    def compare(self, *others: XRay | Result) -> Comparison:
        """See `Result.compare`."""
        return self.result.compare(*(other.result if isinstance(other, XRay) else other for other in others))


def source_of(ddp: Any) -> Source:
    """The source behind whatever is to be recorded.

    Raises:
        TypeError: it cannot be.
    """
    if isinstance(ddp, DistributedDataParallel):
        return MinddpSource(ddp)
    if isinstance(ddp, TorchDDP):
        return NativeSource.of(ddp)
    if all(hasattr(ddp, name) for name in ("watch", "unwatch", "layout", "topic")):
        return ddp
    raise TypeError(
        f"minddp.xray records a DistributedDataParallel, minddp's or torch's, but got {type(ddp).__name__}. "
        f"Wrap the module first."
    )
