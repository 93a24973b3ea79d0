"""Text as bytes: of a folder, or of the source code of Python's standard library, which every machine has."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from minddp.tools.train.settings import SettingsError

# These are not the library's own code: packages installed beside it, its tests, and generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
SEPARATOR = b"\0"  # ends a file; Python source never contains it


def source_files(root: Path, suffix: str = ".py") -> list[str]:
    """Paths relative to `root` of the files below it with this suffix, sorted: the same list on every rank."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # os.walk descends into these
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(suffix)]
    return sorted(found)


def is_held_out(path: str) -> bool:
    """True for one file in ten.

    Validation text consists of whole files, since passages of one file resemble each other. A checksum of the path
    decides, so other files may come and go with another Python version.
    """
    return zlib.crc32(path.encode()) % 10 == 0


def read_bytes(root: Path, paths: list[str], limit_bytes: int) -> Tensor:
    """The concatenated bytes of the files, at most `limit_bytes`: (n,) uint8."""
    text = bytearray()
    for path in paths:
        text += (root / path).read_bytes() + SEPARATOR
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def load_corpus(root: Path, limit_bytes: int, suffix: str = ".py") -> tuple[Tensor, Tensor]:
    """Training text of at most `limit_bytes` bytes, and validation text of at most a tenth of that.

    Raises:
        SettingsError: there are not enough files below `root` for both.
    """
    paths = source_files(root, suffix)
    training, held_out = ([path for path in paths if is_held_out(path) == side] for side in (False, True))
    if not training or not held_out:
        raise SettingsError(
            f"{root} contains {len(paths)} files that end in `{suffix}`, too few for training and validation. Pass "
            f"a folder with more: --task-options folder=PATH suffix=.txt"
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
