"""One rank of `minddp xray --task ...`: train the demo model for some steps under each wrapper, and record them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from minddp.train.settings import Settings, WrapperOptions
from minddp.train.trainer import Trainer
from minddp.train.world import World, open_world
from minddp.xray.command import STEPS, files_in, report, steps_from
from minddp.xray.result import Result
from minddp.xray.window import Window
from minddp.xray.xray import XRay

WRAPPERS: tuple[Literal["minddp", "torch"], ...] = ("minddp", "torch")
TITLES = {"gpt": "A small GPT", "digits": "A small conv net"}


def main(
    out: Path,
    task: Literal["gpt", "digits"] = "gpt",
    steps: str = f"{STEPS.start}:{STEPS.stop}",
    bucket_cap_mb: float = 0.5,
) -> None:
    """Record under both wrappers, one after the other, in one process group."""
    wanted = steps_from(steps)
    with open_world(Settings(task=task)) as world:
        results = []
        for ddp in WRAPPERS:
            settings = Settings(task=task, ddp=ddp, wrapper=WrapperOptions(bucket_cap_mb=bucket_cap_mb))
            save_to = files_in(out) if ddp == "minddp" else []
            results.append(record(settings, world, wanted, save_to))
        ours, theirs = results
        report(ours)
        for suffix in (".html", ".json"):
            ours.compare(theirs).save(out / f"compare{suffix}")


def record(settings: Settings, world: World, steps: range, save_to: Sequence[Path]) -> Result:
    """Train up to the end of `steps`, and return what was recorded of them."""
    trainer = Trainer(settings, world)
    batches = iter(trainer.batches)
    kept: list[XRay] = []
    with Window(trainer.ddp, steps, title=TITLES[settings.task], save_to=save_to, then=kept.append) as window:
        for number in range(steps.stop):
            window.before_step(number)
            trainer.optimizer_step(batches)
    return kept[0].result


if __name__ == "__main__":
    tyro.cli(main)
