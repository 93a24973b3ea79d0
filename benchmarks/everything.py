"""All questions that have a figure, one after another, and the figures: what `make bench` runs.

    python -m benchmarks.everything            # some twenty minutes, on an otherwise idle machine
    python -m benchmarks.everything --smoke    # a minute or two, of no value but to see that all runs

`ladder` and `xray_cost` are asked by themselves.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks import all_reduce, bucket_size, hook_cost, memory, plots, results, versus_torch


@dataclass(frozen=True)
class Config:
    """Answer every question and draw the figures."""

    smoke: bool = False
    """Tiny models and hardly any rounds; nothing is kept."""


def main(config: Config) -> None:
    if config.smoke:
        with tempfile.TemporaryDirectory(prefix="minddp-benchmark-") as directory:
            smoke(Path(directory))
        return
    versus_torch.main(versus_torch.Config())
    bucket_size.main(bucket_size.Config())
    hook_cost.main(hook_cost.Config())
    all_reduce.main(all_reduce.Config())
    memory.main(memory.Config())  # last, as it is the one that may be disturbed
    plots.main(plots.Config())


def smoke(directory: Path) -> None:
    """Every question as small as it can be asked, into `directory`."""

    def out(question: str) -> Path:
        return results.path_of(question, directory=directory)

    versus_torch.main(versus_torch.Config(size="smoke", out=out("versus_torch")))
    bucket_size.main(bucket_size.Config(tiny=True, rounds=2, warmup_rounds=1, out=out("bucket_size")))
    hook_cost.main(hook_cost.Config((10, 100), rounds=2, turn_parameters=1, out=out("hook_cost")))
    all_reduce.main(
        all_reduce.Config(sizes_kib=(4, 64), rounds=2, warmup_rounds=1, turn_mib=0.1, out=out("all_reduce"))
    )
    memory.main(memory.Config(tiny=True, out=out("memory")))
    plots.main(plots.Config(directory=directory))


if __name__ == "__main__":
    main(tyro.cli(Config))
