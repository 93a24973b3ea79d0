"""Jobs below `minddp run` whose ranks do not meet, as tutorials write them: what is said, and how soon.

Most scripts run at once: they mostly sleep.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOON = (
    "import minddp.tools.watchdog.meeting as meeting; meeting.REPORT_EVERY_S = 2.0; meeting.STORE_LIMIT_S = 3.0\n"
)
INIT = """
import datetime, torch.distributed as dist
dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=9))
"""
# Both ranks have imported everything, so that one comes soon after the other also on a busy machine.
TOGETHER = """
import os, pathlib, sys, time, torch.distributed
at = sorted(pathlib.Path(f'{pathlib.Path(sys.argv[0]).stem} {rank}') for rank in '01')
at[int(os.environ['LOCAL_RANK'])].touch()
while not all(path.exists() for path in at):
    time.sleep(0.02)
"""
# Torchrun's ranks do not buffer, so `print` writes a line and its end apart, and lines of two ranks could mix.
SAY = "import sys; say = lambda text: sys.stdout.write(f'{text}\\n')\n"
SCRIPTS = {
    "port": "import os; os.environ['MASTER_ADDR'] = 'localhost'; os.environ['MASTER_PORT'] = '12355'\n"
    + SOON
    + INIT,
    "rank": "import os; os.environ['RANK'] = '0'\n" + SOON + TOGETHER + INIT,
    "world": "import os; os.environ['WORLD_SIZE'] = '3'\n" + SOON + TOGETHER + INIT,
    "late": "import os, pathlib, time\n"
    "def load():\n    loading.touch(); until(waiting); time.sleep(6)\n"
    "def until(flag):\n    while not flag.exists():\n        time.sleep(0.1)\n"
    "loading, waiting = pathlib.Path('loading'), pathlib.Path('waiting')\n"
    "if os.environ['RANK'] == '1':\n    load()\n"
    + SOON
    + SAY
    + "until(loading); waiting.touch()\n"
    + INIT.replace("=9", "=60")
    + "say('met')\n",
    "exited": "import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit()\n" + SOON + INIT,
    "well": "import os; os.environ['MASTER_ADDR'] = 'localhost'\n"
    "os.environ['RANK'] = str(1 - int(os.environ['RANK']))\n"
    + SAY
    + TOGETHER
    + "import threading, torch.distributed as dist\n"
    "dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()\n"
    "say(f'threads {threading.active_count()}')\n",
}


def run(folder: Path, name: str) -> str:
    (folder / f"{name}.py").write_text(SCRIPTS[name])
    done = subprocess.run(
        [sys.executable, "-m", "minddp", "run", "--nproc-per-node", "2", f"{name}.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("meeting")
    with ThreadPoolExecutor(4) as jobs:
        return dict(zip(SCRIPTS, jobs.map(lambda name: run(folder, name), SCRIPTS), strict=True))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("port", r"not returned yet\. Ranks 0 and 1 have come\. On rank 0 .*MASTER_PORT is 12355 instead of \d+\."),
        ("rank", r"not returned yet\. Ranks 0 and 1 have come\. On rank 1 RANK is 0 instead of 1\. Leave"),
        (
            "world",
            r"Ranks 0 and 1 have come\. On rank 0 WORLD_SIZE is 3 instead of 2\. On rank 1",
        ),
        ("late", r"not returned yet\. Rank 0 has come\. Rank 1 has not: its process has ended, or does something"),
        ("exited", r"not returned yet\. Rank 0 has come\. Rank 1 has not: its process has ended"),
    ],
)
def test_what_keeps_the_ranks_from_meeting_is_named(outputs: dict[str, str], name: str, pattern: str) -> None:
    assert re.search(pattern, outputs[name]), outputs[name]


def test_a_rank_that_is_only_late_still_meets_the_others(outputs: dict[str, str]) -> None:
    assert outputs["late"].count("met\n") == 2, outputs["late"]


def test_ranks_may_be_numbered_anew_and_nothing_is_left(outputs: dict[str, str]) -> None:
    assert outputs["well"].count("threads 1\n") == 2, outputs["well"]
    assert "minddp" not in outputs["well"]
