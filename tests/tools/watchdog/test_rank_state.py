"""The line of a script at which a rank is, found from another thread."""

from __future__ import annotations

import re
import sysconfig
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import minddp
from minddp.tools.watchdog import rank_state
from minddp.tools.watchdog.rank_state import RankState, where_is_main_thread


def frames(*paths: str) -> Any:
    """The innermost of these frames."""
    innermost = None
    for line, path in reversed([*enumerate(paths, 1)]):
        code = SimpleNamespace(co_filename=path, co_name="work")
        innermost = SimpleNamespace(f_code=code, f_lineno=line, f_back=innermost)
    return innermost


STDLIB, PACKAGES = (sysconfig.get_path(name) for name in ("stdlib", "purelib"))
LOADER = f"{PACKAGES}/torch/utils/data/dataloader.py"
OWN, OTHERS = "/home/me/train.py", f"{PACKAGES}/trainers/trainer.py"


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        ([OWN], "train.py:1"),
        ([f"{STDLIB}/selectors.py", f"{STDLIB}/multiprocessing/connection.py", LOADER, OTHERS, OWN], "train.py:5"),
        ([minddp.__file__, OWN, f"{STDLIB}/runpy.py"], "train.py:2"),
        (["<frozen importlib._bootstrap>", OWN], "train.py:2"),
        (["<string>"], "<string>:1"),
        (["/usr/lib/python3/dist-packages/numpy/core.py", OWN], "train.py:2"),
        ([f"{STDLIB}/selectors.py", LOADER, OTHERS, "<frozen runpy>"], "selectors.py:1"),
    ],
)
def test_the_place_is_the_scripts_own_line(paths: list[str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the innermost line where all that runs is installed."""
    main = threading.main_thread().ident
    monkeypatch.setattr(rank_state.sys, "_current_frames", lambda: {main: frames(*paths)})
    assert where_is_main_thread() == f"{place} in work"


def test_a_state_made_in_the_main_thread_names_the_script_not_the_generated_init() -> None:
    assert re.fullmatch(r"test_rank_state\.py:\d+ in test_a_state_made_.*", RankState().where)
