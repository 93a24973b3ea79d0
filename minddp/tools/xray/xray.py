"""`with minddp.xray(ddp) as x:` records the steps inside; afterwards `x` saves and explains them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.ddp import DistributedDataParallel
from minddp.tools.xray.peers import Peers
from minddp.tools.xray.record import Recorder
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import Result
from minddp.tools.xray.sources import MinddpSource, NativeSource, Source

LIMIT_S = 30.0


class XRay(Result):
    """A recording, and its result when it is over.

    Any ranks may record, one or all; the first of them gathers the recordings at the end. See
    [Note: which ranks record]. An exception that ends the recording discards it.

    Args:
        ddp: minddp's wrapper; torch's, as far as it can be watched (see `sources.py`); or a `Source`.
        title: its name in pictures; by default the module's class.
        limit_s: how long to wait at the end for other ranks that record.
    """

    def __init__(self, ddp: nn.Module | Source, *, title: str | None = None, limit_s: float = LIMIT_S):
        self.source = source_of(ddp)
        self._title = title or self.source.title
        self._limit_s = limit_s
        self._recorder: Recorder | None = None  # of the recording under way
        super().__init__(None)

    def __enter__(self) -> XRay:
        self.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop(error)

    def start(self) -> None:
        """Record from now on. Call it between two steps, so that the first one is whole."""
        self._recording = None
        vars(self).pop("analysis", None)
        self._peers = Peers(self.source, self._limit_s)
        self._recorder = Recorder(self.source)

    def stop(self, error: BaseException | None = None) -> None:
        """End the recording and gather the recordings of all ranks; discard it if an `error` ends it."""
        assert self._recorder is not None, "start() comes before stop()"
        recorder, self._recorder = self._recorder, None
        if error is not None:
            recorder.discard()
            self._peers.leave()
            return
        ranks, notes, self.is_first = self._peers.gather(recorder.stop())
        self._recording = Recording(self._title, ranks, self.source.wrapper, notes, self.source.has_plan)


def source_of(ddp: Any) -> Source:
    """The source of events of a wrapper; a source is returned unchanged.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(ddp, DistributedDataParallel):
        return MinddpSource(ddp)
    if isinstance(ddp, TorchDDP):
        return NativeSource.of(ddp)
    if all(hasattr(ddp, name) for name in ("events", "plan", "topic")):
        return ddp
    raise TypeError(
        f"minddp.xray records a DistributedDataParallel, minddp's or torch's, but got {type(ddp).__name__}. "
        f"Wrap the module first."
    )
