"""Text as bytes: of a folder, or of what every machine has, the source code of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from minddp.tools.train.settings import SettingsError

# Not the library's own code: packages installed beside it, its tests, and generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
SEPARATOR = b"\0"  # ends a file; Python source never contains it


def source_files(root: Path, suffix: str = ".py") -> list[str]:
    """Paths of the files below `root` that end so, relative to it, sorted: the same list on every rank."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # os.walk looks here
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(suffix)]
    return sorted(found)


def split_by_file(paths: list[str], one_in: int = 10) -> tuple[list[str], list[str]]:
    """Files to train on, and about one in `one_in` held out for validation.

    By file and not by position in the text, since passages of one file resemble each other. A checksum of the path
    decides, so a file stays on its side when others come or go with another Python version.
    """
    held_out = [path for path in paths if zlib.crc32(path.encode()) % one_in == 0]
    return sorted(set(paths) - set(held_out)), held_out


def read_bytes(root: Path, paths: list[str], limit_bytes: int) -> Tensor:
    """The files' bytes, one file after another, cut at `limit_bytes`: (n,) uint8."""
    text = bytearray()
    for path in paths:
        text += (root / path).read_bytes() + SEPARATOR
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def load_corpus(root: Path, limit_bytes: int, suffix: str = ".py") -> tuple[Tensor, Tensor]:
    """Training and validation text as bytes, the validation text at most a tenth of `limit_bytes`.

    Raises SettingsError if there are not enough files below `root` for both.
    """
    training, held_out = split_by_file(source_files(root, suffix))
    if not training or not held_out:
        raise SettingsError(
            f"{root} holds {len(training) + len(held_out)} files that end in `{suffix}`, too few to train on and "
            f"to hold some out. Name a folder with more: --task-options folder=PATH suffix=.txt"
        )
    return read_bytes(root, training, limit_bytes), read_bytes(root, held_out, limit_bytes // 10)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows of `context` bytes; a sample is (window, the same window one byte later), int64."""

    def __init__(self, text: Tensor, context: int):
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]
