"""Checkpoints, `checkpoints/step-00000500.pt`: written atomically, the newest few kept, and found again.

A checkpoint is a dictionary of plain values and tensors, so loading one executes no code. `Trainer.state` makes it.
"""

from __future__ import annotations

import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from minddp.tools.train.settings import RunError, Settings, SettingsError
from minddp.tools.train.world import World

_log = logging.getLogger(__name__)
State = dict[str, Any]

DAMAGES = (OSError, RuntimeError, ValueError, KeyError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError)


class CheckpointFiles:
    """The checkpoints in the folder of a run. Keeps the newest `keep` and deletes older ones."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder / "checkpoints"
        self._keep = keep

    def paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*.pt"), reverse=True)

    def newest(self) -> State | None:
        """The newest checkpoint, on the CPU; None if there is none. Damaged ones are skipped with a warning.

        Raises:
            SettingsError: all are damaged.
        """
        for path in self.paths():
            try:
                return load(path)
            except DAMAGES as reason:
                _log.warning("%s is skipped: %s", path, reason)
        if not self.paths():
            return None
        raise SettingsError(
            f"All checkpoints in {self.folder} are damaged. To start a new run, remove them or pass another --out."
        )

    def check_resume(self, settings: Settings) -> None:
        """Raises SettingsError if the folder contains a run that is not to be continued."""
        if settings.resume == "no" and self.paths():
            raise SettingsError(
                f"{self.folder} already contains a run. Pass --resume auto to continue it, or another --out, or "
                f"remove the folder."
            )

    def write(self, state: State) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(self.folder / f"step-{state['step']:08}.pt", lambda file: torch.save(state, file))
        except (OSError, RuntimeError) as error:
            raise RunError(
                f"Cannot write a checkpoint to {self.folder}: {error}. Earlier ones are intact: free some disk "
                f"space, then continue with --resume auto."
            ) from error
        for old in self.paths()[self._keep :]:
            old.unlink()


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file with `write`: it appears complete at `path` or, after an error, not at all.

    A rename replaces a file atomically, but only its name: an fsync of the file puts the bytes on the disk before,
    or a power cut could leave the new name on an empty file. An fsync of the folder makes the rename durable. A
    killed writer leaves a `.part` file, which the next writer overwrites.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # frees the space on a full disk
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def load(path: Path) -> State:
    """Load a checkpoint on the CPU. Raises one of DAMAGES."""
    with zipfile.ZipFile(path) as file:  # torch.save writes checksums, which torch.load does not compare
        if part := file.testzip():
            raise zipfile.BadZipFile(f"its part {part} has changed since it was written")
    return torch.load(path, map_location="cpu", weights_only=True)


def find_checkpoint(files: CheckpointFiles, world: World) -> State | None:
    """The newest checkpoint that any host has, on every rank: hosts need no shared disk. Collective."""
    ours = files.newest() if world.local_rank == 0 else None
    steps = [-1] * world.size
    dist.all_gather_object(steps, -1 if ours is None else ours["step"], group=world.control)
    shared = [ours]
    dist.broadcast_object_list(shared, steps.index(max(steps)), group=world.control)
    return shared[0]
