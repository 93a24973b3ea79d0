"""The state of a rank: where it is in training and in the script, and which collectives it has launched."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import minddp

INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
LIBRARIES = tuple(os.path.dirname(module.__file__ or "") for module in (os, minddp, torch))
# Instead of an answer:
SILENT, EXITED, LEFT = "does not answer", "has exited", "has dropped the module"
STOPPED, ENDED, UNWATCHED = "is stopped", "has left the process group", "is no longer watched"


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def where_is_main_thread() -> str:
    """`train.py:57 in evaluate`: the innermost frame of the main thread outside of libraries, if there is one."""
    frame = innermost = main_frame()
    generated = RankState.__init__.__code__  # its file is "<string>", and the main thread may be running it
    while frame is not None and (_is_of_a_library(frame.f_code.co_filename) or frame.f_code is generated):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


@functools.cache  # an audit asks in each backward
def _is_of_a_library(path: str) -> bool:
    """True for the standard library, minddp, torch and all installed packages."""
    is_installed = not INSTALLED.isdisjoint(Path(path).parts)
    return is_installed or path.startswith(("<frozen ", *(f"{folder}{os.sep}" for folder in LIBRARIES)))


@dataclass(frozen=True)
class RankState:
    """A rank's answer.

    `missing`: the parameters without a gradient. `recent`: the latest collectives by number, or by group and
    number; equal ones meet across ranks. `waiting_s`: how long the rank has waited, `None` if it does not wait;
    `waits_in`: in which call, if not in the latest collective. `drops`: the rank is about to drop a backward that
    an exception has ended.
    """

    phase: str = "IDLE"
    backward: int = 0
    accumulates: bool = False
    missing: tuple[str, ...] = ()
    recent: Mapping[Any, str] = field(default_factory=dict)
    waiting_s: float | None = None
    waits_in: str = ""
    where: str = field(default_factory=where_is_main_thread)
    process: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    drops: bool = False

    @property
    def number(self) -> Any:
        """The number of the latest collective; 0 if there was none."""
        return next(reversed([*self.recent]), 0)

    @property
    def last(self) -> str:
        return (
            f"collective {numbered(self.number)}, {self.recent[self.number]}"
            if self.recent
            else "no collective yet"
        )


def numbered(number: Any) -> str:
    return str(number) if isinstance(number, int) else f"{number[1]} of group {number[0]}"
