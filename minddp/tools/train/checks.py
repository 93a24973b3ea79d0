"""Checks of the settings against this machine, the ranks, the data and the folder, before anything is trained."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from minddp.platform import streams
from minddp.tools.train.batches import Batches
from minddp.tools.train.checkpoint import CheckpointFiles, State, find_checkpoint
from minddp.tools.train.cluster import world_sizes
from minddp.tools.train.settings import Settings, SettingsError
from minddp.tools.train.task import Task, load_task
from minddp.tools.train.trainer import wrapper_options
from minddp.tools.train.world import choose_device


def check_before_start(settings: Settings) -> None:
    """Raise SettingsError, before ranks are started, for everything that would fail on all of them."""
    files = CheckpointFiles(settings.folder, settings.keep)
    checked(settings, files)
    check_folder(settings)
    if settings.overwrite:
        files.discard()


def checked(settings: Settings, files: CheckpointFiles | None) -> tuple[Task, State | None]:
    """The task, and the newest checkpoint in `files`. Raises SettingsError."""
    check_world(settings, os.environ)
    wrapper_options(settings)
    found = None if files is None else find_checkpoint(settings, files)
    task = load_task(settings)
    Batches(task.training, settings, settings.logical_ranks or world_sizes(settings, os.environ)[0])
    return task, found


def check_folder(settings: Settings) -> None:
    """Create the folder of the run. Raises SettingsError if it is not writable."""
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.folder).close()
    except OSError as error:
        raise SettingsError(f"Cannot write to {settings.folder}: {error.strerror}. Pass another --out.") from error


def check_world(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise SettingsError if the settings do not fit the launcher, the number of ranks or the devices."""
    world_size, local_size = world_sizes(settings, environment)
    if settings.nproc not in (None, local_size):
        raise SettingsError(
            f"--nproc {settings.nproc} differs from the {local_size} ranks that the launcher has started on this "
            f"machine; remove --nproc, and set torchrun --nproc-per-node or srun --ntasks-per-node."
        )
    restarts = ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT")
    if settings.resume == "no" and any(environment.get(name, "0") != "0" for name in restarts):
        raise SettingsError(
            "This launcher restarts ranks, and restarted ranks must continue: pass --resume auto. To discard an "
            "old run, remove its folder or pass another --out."
        )
    if settings.logical_ranks is not None and settings.logical_ranks < world_size:
        raise SettingsError(
            f"--logical-ranks {settings.logical_ranks} is less than the number of ranks, so some of the "
            f"{world_size} ranks would compute nothing. Raise it, or start at most {settings.logical_ranks} ranks."
        )
    if settings.comm_hook == "bf16_compress" and choose_device(settings, 0, local_size).type == "cpu":
        raise SettingsError("--comm-hook bf16_compress needs NCCL; use fp16_compress on the CPU.")
    if settings.device == "cuda" and (found := streams.num_devices("cuda")) < local_size:
        raise SettingsError(
            f"--device cuda needs a device for each of the {local_size} ranks, but this machine has {found}; use "
            f"--nproc {max(1, found)} or --device cpu."
        )
