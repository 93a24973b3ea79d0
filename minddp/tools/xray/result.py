"""The result of a recording: save it, explain it, and compare it with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from rich.console import Console

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.chrome_trace import trace_events
from minddp.tools.xray.explain import explain
from minddp.tools.xray.page import render
from minddp.tools.xray.recording import Recording

RECORDINGS = "minddp"  # under this key in a .json file


def _dump(analyses: Sequence[Analysis]) -> str:
    recordings = [analysis.recording.to_dict() for analysis in analyses]
    return json.dumps({RECORDINGS: recordings, "traceEvents": trace_events(analyses)}, separators=(",", ":"))


WRITERS: dict[str, Callable[[Sequence[Analysis]], str]] = {".html": render, ".json": _dump}


class Comparison:
    """Several recordings side by side. A single one is a `Result` or an `XRay`."""

    def __init__(self, results: Iterable[Result]):
        self._results = tuple(results)

    @property
    def results(self) -> tuple[Result, ...]:
        return self._results

    @property
    def _analyses(self) -> list[Analysis]:
        """Empty on other ranks than the first one that recorded."""
        is_first = all(result.is_first for result in self.results)
        return [result.analysis for result in self.results] if is_first else []

    def save(self, path: str | Path) -> None:
        """Write a page (.html) or the recording itself (.json), by the suffix; on the first rank only.

        `load` and ui.perfetto.dev open the .json file.

        Raises:
            ValueError: another suffix, or no step was recorded.
        """
        path = Path(path)
        if not (analyses := self._analyses):
            return
        if path.suffix not in WRITERS:
            raise ValueError(f"The suffix of {path} is not known: it must be one of {', '.join(WRITERS)}.")
        text = WRITERS[path.suffix](analyses)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def explain(self, console: Console | None = None) -> None:
        """Print where the time goes, and of a single recording also predictions; on the first rank only.

        Raises:
            ValueError: no step was recorded.
        """
        if analyses := self._analyses:
            explain(analyses, console or Console())

    def compare(self, *others: Comparison) -> Comparison:
        """These recordings and others, on one scale."""
        return Comparison(result for shown in (self, *others) for result in shown.results)


class Result(Comparison):
    """One recording. Only the rank that `is_first` writes and prints."""

    def __init__(self, recording: Recording, *, is_first: bool = True):
        super().__init__([self])
        self.recording = recording
        self.is_first = is_first

    @cached_property
    def analysis(self) -> Analysis:
        return Analysis(self.recording)


def load(path: str | Path) -> Result | Comparison:
    """Read a .json file that `save` has written; a `Comparison` if it holds several recordings.

    Raises:
        ValueError: the file is something else.
    """
    recordings = json.loads(Path(path).read_text()).get(RECORDINGS)
    if not recordings:
        raise ValueError(f"{path} holds no recording of minddp; pass a .json file that x-ray has saved.")
    results = [Result(Recording.from_dict(recording)) for recording in recordings]
    return results[0] if len(results) == 1 else Comparison(results)
