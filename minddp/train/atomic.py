"""Files that are whole or absent, whenever the writer is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file that appears at `path` whole, in place of what was there, or not at all.

    [Note: atomic write]
    A rename replaces a file in one move, but only the name: the bytes must be on the disk before (fsync of
    the file), or a power cut could leave the new name on an empty file; and the move itself is on the disk
    only after an fsync of the folder. What a killed writer leaves is a `.part` file that the next writer
    overwrites.
    """
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
