"""One rank of `minddp xray script.py`: run somebody's script, and record some of its steps.

The script runs as `python script.py` would run it, with torch's DistributedDataParallel replaced by minddp's
(`--ddp torch` leaves it). Recorded is the first DistributedDataParallel that trains in this process; processes that
the script starts itself are not seen.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from minddp.xray.command import STEPS, files_in, report, steps_from
from minddp.xray.window import FirstWrapper, Window


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=steps_from, default=STEPS)
    parser.add_argument("--ddp", choices=("minddp", "torch"), default="minddp")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    told = parser.parse_args(arguments)
    if told.ddp == "minddp":
        import minddp

        minddp.install()

    def make_window(ddp: nn.Module) -> Window:
        return Window(ddp, told.steps, title=told.script.name, save_to=files_in(told.out), then=report)

    first = FirstWrapper(make_window)
    sys.argv = [str(told.script), *told.arguments]
    sys.path.insert(0, str(told.script.resolve().parent))
    try:
        runpy.run_path(str(told.script), run_name="__main__")
    except BaseException as error:
        failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        first.close(error if failed else None)
        raise
    first.close()


if __name__ == "__main__":
    main()
