"""The result of a recording: save it, and explain it."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from rich.console import Console

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.chrome_trace import trace_events
from minddp.tools.xray.page import render
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.words import explain

RECORDING = "minddp"  # under this key in a .json file


def _dump(analysis: Analysis) -> str:
    content = {RECORDING: analysis.recording.to_dict(), "traceEvents": trace_events(analysis)}
    return json.dumps(content, separators=(",", ":"))


WRITERS = {".html": render, ".json": _dump}


class Result:
    """One recording. Only the rank that `is_first` writes and prints; other methods do nothing elsewhere."""

    def __init__(self, recording: Recording | None, *, is_first: bool = True):
        self._recording = recording
        self.is_first = is_first

    @property
    def recording(self) -> Recording:
        """The recording, once it has ended.

        Raises:
            RuntimeError: it has not ended yet, or an exception has ended it.
        """
        if self._recording is None:
            raise RuntimeError(
                "This x-ray has not ended yet, or an exception has ended it: use its result after the `with` "
                "block, or after stop()."
            )
        return self._recording

    @cached_property
    def analysis(self) -> Analysis:
        return Analysis(self.recording)

    def save(self, path: str | Path) -> None:
        """Write a page (.html) or the recording itself (.json), by the suffix; on the first rank only.

        `load` and ui.perfetto.dev open the .json file.

        Raises:
            ValueError: another suffix, or no step was recorded.
        """
        path = Path(path)
        if not self.is_first:
            return
        if path.suffix not in WRITERS:
            raise ValueError(f"The suffix of {path} is not known: it must be one of {', '.join(WRITERS)}.")
        text = WRITERS[path.suffix](self.analysis)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def explain(self, console: Console | None = None) -> None:
        """Print where the time goes and the changes that would make a step shorter; on the first rank only.

        Raises:
            ValueError: no step was recorded.
        """
        if self.is_first:
            explain(self.analysis, console or Console())


def load(path: str | Path) -> Result:
    """Read a .json file that `save` has written.

    Raises:
        ValueError: the file is something else.
    """
    recording = json.loads(Path(path).read_text()).get(RECORDING)
    if not isinstance(recording, dict):
        raise ValueError(f"{path} holds no recording of minddp; pass a .json file that x-ray has saved.")
    return Result(Recording.from_dict(recording))
