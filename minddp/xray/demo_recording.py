"""One rank of `minddp xray --task ...`: train the demo model for some steps under each wrapper, and record them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minddp.train.settings import Settings, WrapperOptions
from minddp.train.trainer import Trainer
from minddp.train.world import World, open_world
from minddp.xray.command_line import files_in, parse
from minddp.xray.result import Result
from minddp.xray.xray import Window, XRay

TITLES = {"gpt": "A small GPT", "digits": "A small conv net"}


def main() -> None:
    """Record under both wrappers, one after the other, in one process group."""
    options = parse(None)
    wrapper = WrapperOptions(bucket_cap_mb=options.bucket_cap_mb)
    with open_world(Settings(task=options.task)) as world:
        settings = Settings(task=options.task, ddp="minddp", wrapper=wrapper)
        ours = record(settings, world, options.steps, files_in(options.out))
        theirs = record(Settings(task=options.task, ddp="torch", wrapper=wrapper), world, options.steps)
        ours.explain()
        for suffix in (".html", ".json"):
            ours.compare(theirs).save(options.out / f"compare{suffix}")


def record(settings: Settings, world: World, steps: range, save_to: Sequence[Path] = ()) -> Result:
    """Train up to the end of `steps`, and return their recording."""
    trainer = Trainer(settings, world)
    batches = iter(trainer.batches)
    kept: list[XRay] = []
    with Window(trainer.ddp, steps, title=TITLES[settings.task], save_to=save_to, then=kept.append) as window:
        for number in range(steps.stop):
            window.before_step(number)
            trainer.optimizer_step(batches)
    return kept[0].result


if __name__ == "__main__":
    main()
