"""All questions that have a figure, one after another, and the figures: what `make bench` runs.

    python -m benchmarks.everything                 # some twenty minutes, on an otherwise idle machine
    python -m benchmarks.everything --size smoke    # a minute or two, of no value but to see that all runs

`earned`, `hosts`, `ladder` and `xray_cost` are asked by themselves.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmarks import all_reduce, bucket_size, hook_cost, memory, plots, question, versus_torch


@dataclass(frozen=True)
class Config:
    """Answer every question and draw the figures."""

    size: Literal["full", "smoke"] = "full"
    """smoke: tiny models and hardly any rounds; nothing is kept."""


def main(config: Config) -> None:
    with tempfile.TemporaryDirectory(prefix="minddp-benchmark-") as passing:
        directory = Path(passing) if config.size == "smoke" else question.RESULTS
        for asked in (versus_torch, bucket_size, hook_cost, all_reduce, memory):  # load does not disturb the last
            out = question.path_of(asked.__name__.rpartition(".")[2], directory)
            asked.main(asked.Config(size=config.size, out=out))  # type: ignore[attr-defined]
        plots.main(plots.Config(directory))


if __name__ == "__main__":
    main(tyro.cli(Config))
