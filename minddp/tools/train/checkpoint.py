"""Checkpoints: written atomically with a checksum, kept (the newest few and the best), and found again.

checkpoints/step-00000500-8f3a0c6d51e2b794.pt     the step, and the digest of the file's bytes
checkpoints/best.pt                               a copy of the one with the lowest validation loss

A checkpoint is a dictionary of plain values and tensors, so loading one executes no code. `Trainer.state` makes it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from minddp.tools.train.settings import RunError, Settings, SettingsError
from minddp.tools.train.world import World

_log = logging.getLogger(__name__)
State = dict[str, Any]

# A resumed run must have the same values of these; limits, intervals, wrapper, ranks and --accumulate may change.
DECISIVE = (
    *("task", "task_options", "seed", "batch_size", "logical_ranks", "precision", "optimizer", "learning_rate"),
    *("scale_rate", "schedule", "warmup_steps", "weight_decay", "clip_norm"),
)


class Damaged(Exception):
    """A checkpoint cannot be loaded; the message is the reason."""


class CheckpointFiles:
    """The checkpoints in the folder of a run, of which the newest `keep` stay.

    A thread writes them while training continues. It keeps an error in `failure` instead of raising it: only rank 0
    writes, and the other ranks would wait for a rank 0 that raises alone. After an error nothing more is written.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder / "checkpoints"
        self.failure: RunError | None = None
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "minddp/checkpoint")
        self._latest: Future[None] | None = None

    def paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*-*.pt"), reverse=True)

    def newest(self) -> tuple[Path, State] | None:
        """The newest undamaged checkpoint, on the CPU. Damaged ones are skipped with a warning."""
        for path in self.paths():
            try:
                return path, load(path)
            except Damaged as reason:
                _log.warning("%s is skipped: %s", path, reason)
        return None

    def discard(self) -> None:
        for path in [*self.folder.glob("*.pt"), *self.folder.glob("*.part")]:
            path.unlink()

    def save(self, state: State, *, is_best: bool) -> None:
        """Write a copy of `state` in the thread, once the previous checkpoint is on the disk."""
        self.wait()
        if self.failure is None:
            state = tree_map(lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, state)
            self._latest = self._thread.submit(self._try_to_write, state, is_best)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk or has failed."""
        if self._latest is not None:
            self._latest.result()

    def _try_to_write(self, state: State, is_best: bool) -> None:
        try:
            self.write(state, is_best=is_best)
        except (OSError, RuntimeError) as error:
            newest = next(iter(self.paths()), "none")
            self.failure = RunError(
                f"Cannot write a checkpoint to {self.folder}: {error}. The newest whole one is {newest}. Free some "
                f"disk space, then continue with --resume yes."
            )

    def write(self, state: State, *, is_best: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{state['step']:08}-DIGEST.pt"
        path = write_atomically(path, lambda file: torch.save(state, file))
        if is_best:
            os.replace(shutil.copyfile(path, self.folder / "best.pt.part"), self.folder / "best.pt")
        for old in self.paths()[self._keep :]:
            old.unlink()


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> Path:
    """Write a file with `write`: it appears complete at `path` or, after an error, not at all.

    In the name of the file DIGEST is replaced by the digest of its bytes. Returns the path.

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
        path = path.with_name(path.name.replace("DIGEST", digest_of(part)))
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)  # frees the space on a full disk
        hidden = error.__context__  # torch.save raises an error of its own after the error of the disk
        raise hidden if isinstance(hidden, OSError) else error from None
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return path


def digest_of(path: Path) -> str:
    """A checksum of the bytes of a file, 16 characters long."""
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def load(path: Path) -> State:
    """Load a checkpoint on the CPU. Raises Damaged."""
    try:
        if path.stem.startswith("step-") and digest_of(path) != path.stem.rpartition("-")[2]:
            raise Damaged("its bytes have changed since it was written")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise Damaged(str(error)) from error


def decisive_settings(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in DECISIVE} | {"task_options": list(settings.task_options)}


def find_checkpoint(settings: Settings, files: CheckpointFiles) -> State | None:
    """The newest undamaged checkpoint on this host, or None to start a new run.

    Raises:
        SettingsError: --resume contradicts the folder, or the checkpoint belongs to a run with other settings.
    """
    if settings.resume == "no" and files.paths() and not settings.overwrite:
        raise SettingsError(
            f"{files.folder} already contains a run. Pass --resume yes to continue it, --overwrite to discard it, "
            f"or another --out."
        )
    found = files.newest() if settings.resume != "no" else None
    if settings.resume == "yes" and found is None:
        raise SettingsError(
            f"{files.folder} contains no undamaged checkpoint to resume from. Remove --resume to start a new run, "
            f"or pass the right folder with --out."
        )
    if found is None:
        return None
    path, state = found
    then, now = state["decisive"], decisive_settings(settings)
    if changed := [f"{name} {then.get(name)} is now {now[name]}" for name in now if now[name] != then.get(name)]:
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
