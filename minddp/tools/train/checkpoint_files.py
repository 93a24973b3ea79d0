"""Checkpoints on disk: whole or absent, with a checksum, the last few and the best.

checkpoints/step-00000500-8f3a0c6d51e2b794.pt     the step, and the digest of the file's bytes
checkpoints/best.pt                               a copy of that with the lowest validation loss
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from minddp.tools.train.settings import RunError

_log = logging.getLogger(__name__)


class Damaged(Exception):
    """A file that cannot be loaded; the message is the reason."""


def digest_of(path: Path) -> str:
    """A checksum of the file's bytes, as 16 characters."""
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> Path:
    """Let `write` fill a file that appears whole at `path`, in place of what was there, or not at all.

    Returns the path, in which DIGEST has become that of the file's bytes.

    [Note: atomic write]
    A rename replaces a file in one move, but only the name: the bytes must be on the disk before (fsync of the
    file), or a power cut could leave the new name on an empty file; and the move itself is there after an fsync of
    the folder. A killed writer leaves a `.part` file that the next one overwrites.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        path = path.with_name(path.name.replace("DIGEST", digest_of(part)))
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)  # on a full disk, let others have the space
        hidden = error.__context__  # torch.save raises an error of its own after that of the disk
        raise hidden if isinstance(hidden, OSError) else error from None
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return path


class CheckpointFiles:
    """The checkpoints in a run's folder. `keep` of them stay."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder / "checkpoints"
        self._keep = keep

    def paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*-*.pt"), reverse=True)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole one, on the CPU; those before it that are damaged are skipped with a warning."""
        for path in self.paths():
            try:
                return path, load(path)
            except Damaged as reason:
                _log.warning("%s is skipped: %s", path, reason)
        return None

    def discard(self) -> None:
        for path in [*self.folder.glob("*.pt"), *self.folder.glob("*.part")]:
            path.unlink()

    def write(self, state: dict[str, Any], *, is_best: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{state['step']:08}-DIGEST.pt"
        path = write_atomically(path, lambda file: torch.save(state, file))
        if is_best:
            os.replace(shutil.copyfile(path, self.folder / "best.pt.part"), self.folder / "best.pt")
        for old in self.paths()[self._keep :]:
            old.unlink()


def load(path: Path) -> Any:
    """Plain values and tensors, on the CPU. Raises Damaged."""
    try:
        if path.stem.startswith("step-") and digest_of(path) != path.stem.rpartition("-")[2]:
            raise Damaged("its bytes are not those that were written")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise Damaged(str(error)) from error


class Saver:
    """Writes copies of the state on rank 0 in a thread, and measures how long training waits for it."""

    def __init__(self, files: CheckpointFiles):
        self.costs_s: list[float] = []  # of each checkpoint, to training
        self._files = files
        self._thread = ThreadPoolExecutor(1, "minddp/checkpoint")
        self._latest: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        return self._latest is not None and self._latest.done() and self._latest.exception() is not None

    def save(self, state: dict[str, Any], *, is_best: bool, began: float) -> None:
        """Write a checkpoint; `began` is when training stopped for it, on the monotonic clock.

        Errors come from `wait`; after one, nothing more is written.
        """
        if self._latest is not None:
            wait([self._latest])
        if self.has_failed:
            return
        state = tree_map(lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, state)
        self._latest = self._thread.submit(self._files.write, state, is_best=is_best)
        self.costs_s.append(time.monotonic() - began)

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk. Raises RunError if it could not be written."""
        try:
            if self._latest is not None:
                self._latest.result()
        except OSError as error:
            newest = next(iter(self._files.paths()), "none")
            raise RunError(
                f"Cannot write a checkpoint to {self._files.folder}: {error.strerror}. The newest whole one "
                f"is {newest}; see to the disk, then continue with --resume yes."
            ) from error


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints, each of which costs `cost_s`, that lose the least time.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37; its
    first term is Young's formula of 1974.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return (2 * cost_s * mtbf_s) ** 0.5 * (1 + share**0.5 / 3 + share / 9) - cost_s
