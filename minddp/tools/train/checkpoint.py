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
# A resumed run must have the same values of these; limits, intervals, wrapper, ranks and --accumulate may change.
DECISIVE = (
    *("task", "task_options", "seed", "batch_size", "logical_ranks", "precision", "optimizer", "learning_rate"),
    *("scale_rate", "schedule", "warmup_steps", "weight_decay", "clip_norm"),
)


class CheckpointFiles:
    """The checkpoints in the folder of a run. Keeps the newest `keep` and deletes older ones."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder / "checkpoints"
        self._keep = keep

    def paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*.pt"), reverse=True)

    def newest(self) -> tuple[Path, State]:
        """The newest undamaged checkpoint, on the CPU. Damaged ones are skipped with a warning.

        Raises:
            SettingsError: there is none.
        """
        for path in self.paths():
            try:
                return path, load(path)
            except DAMAGES as reason:
                _log.warning("%s is skipped: %s", path, reason)
        raise SettingsError(
            f"All checkpoints in {self.folder} are damaged. To start a new run, pass --overwrite "
            f"instead of --resume, or another --out."
        )

    def discard(self) -> None:
        for path in self.folder.glob("step-*"):
            path.unlink(missing_ok=True)  # on a shared disk another host may be quicker

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


def find_checkpoint(settings: Settings, files: CheckpointFiles) -> State | None:
    """The newest undamaged checkpoint on this host, or None to start a new run.

    Raises:
        SettingsError: --resume contradicts the folder, or the checkpoint belongs to a run with other settings.
    """
    if settings.resume == "no":
        if files.paths() and not settings.overwrite:
            raise SettingsError(
                f"{files.folder} already contains a run. Pass --resume auto to continue it, --overwrite to discard "
                f"it, or another --out."
            )
        return None
    if not files.paths():
        return None
    path, state = files.newest()
    then, now = state["decisive"], vars(settings)
    if changed := [f"{name} {then[name]} is now {now[name]}" for name in DECISIVE if now[name] != then[name]]:
        raise SettingsError(
            f"{path} belongs to a run with other settings: {'; '.join(changed)}. "
            f"Pass the same settings to resume it, or another --out to start a new run."
        )
    return state


def share_newest(ours: State | None, world: World) -> State | None:
    """Broadcast the newest checkpoint that any rank has found: hosts need no shared disk. Collective."""
    steps = [-1] * world.size
    dist.all_gather_object(steps, -1 if ours is None else ours["step"], group=world.control)
    shared = [ours]
    if max(steps) >= 0:
        dist.broadcast_object_list(shared, steps.index(max(steps)), group=world.control)
    return shared[0]
