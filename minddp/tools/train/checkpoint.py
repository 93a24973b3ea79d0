"""The state of a run: which checkpoint it continues from, and how that reaches all ranks.

A state is a dictionary of plain values and tensors, so loading one executes no code. `Trainer.state` makes it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from minddp.tools.train.checkpoint_files import CheckpointFiles
from minddp.tools.train.settings import Settings, SettingsError
from minddp.tools.train.world import World

State = dict[str, Any]

# A resumed run must have the same of these; limits, intervals, wrapper, ranks and --accumulate may change.
DECISIVE = (
    *("task", "task_options", "seed", "batch_size", "logical_ranks", "precision", "optimizer", "learning_rate"),
    *("scale_rate", "schedule", "warmup_steps", "weight_decay", "clip_norm"),
)


def decisive_settings(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in DECISIVE} | {"task_options": list(settings.task_options)}


def find_checkpoint(settings: Settings, files: CheckpointFiles) -> State | None:
    """The newest whole checkpoint on this host, to continue from; None to start.

    Raises SettingsError if there is one and --resume says no, or none and it says yes; or it is of another run.
    """
    if settings.resume == "no" and files.paths() and not settings.overwrite:
        raise SettingsError(
            f"{files.folder} holds a run. Pass --resume yes to continue it, --overwrite to discard it, or another "
            f"--out."
        )
    found = files.newest() if settings.resume != "no" else None
    if settings.resume == "yes" and found is None:
        raise SettingsError(
            f"There is no whole checkpoint in {files.folder} to resume. Leave --resume out to start, or name its "
            f"folder: --out."
        )
    if found is None:
        return None
    path, state = found
    then, now = state["decisive"], decisive_settings(settings)
    if changed := [f"{name} {then.get(name)} is now {now[name]}" for name in now if now[name] != then.get(name)]:
        raise SettingsError(
            f"{path} belongs to a run with other settings: {'; '.join(changed)}. "
            f"Give the same settings to resume it, or another --out to start a new run."
        )
    return state


def share_newest(ours: State | None, world: World) -> State | None:
    """Give every rank the newest checkpoint that any of them has found, so no shared disk is needed. Collective."""
    steps = [-1] * world.size
    dist.all_gather_object(steps, -1 if ours is None else ours["step"], group=world.control)
    shared = [ours]
    if max(steps) >= 0:
        dist.broadcast_object_list(shared, steps.index(max(steps)), group=world.control)  # a pickle, of this job
    return shared[0]
