"""A run on disk: all state that determines how it continues."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minddp.train.atomic import write_atomically
from minddp.train.batches import Position
from minddp.train.settings import Settings, SettingsError

# A resumed run must have the same of these. Limits may be raised, intervals changed, another wrapper tried.
DECISIVE = (
    *("task", "gpt", "seed", "batch_size", "accumulate"),
    *("learning_rate", "warmup_steps", "final_fraction", "weight_decay", "clip_norm"),
)


@dataclass(frozen=True)
class Checkpoint:
    """All state that determines how a run continues: plain values and tensors, so loading executes no code."""

    decisive: dict[str, Any]
    step: int
    elapsed_s: float
    position: Position
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random_states: list[dict[str, Tensor]]  # of each rank

    def save(self, path: Path) -> None:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["position"] = dataclasses.asdict(self.position)
        write_atomically(path, lambda file: torch.save(fields, file))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """The checkpoint at `path`, on the CPU. Raises SettingsError for a file that is something else."""
        try:
            fields = torch.load(path, map_location="cpu", weights_only=True)
            fields["position"] = Position(**fields["position"])
            return cls(**fields)
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
            raise SettingsError(f"{path} is no checkpoint of this recipe. Name another --out.") from error


def decisive_settings(settings: Settings) -> dict[str, Any]:
    """The settings that decide the bits, as plain values."""
    fields = dataclasses.asdict(settings)
    return {name: fields[name] for name in DECISIVE}


def checkpoint_path(settings: Settings) -> Path:
    return settings.folder / "checkpoint.pt"


def check_checkpoint(settings: Settings, world_size: int) -> None:
    """Raise SettingsError unless the folder has a matching checkpoint to resume, or none to start."""
    path = checkpoint_path(settings)
    if not settings.resume:
        if path.exists() and not settings.overwrite:
            raise SettingsError(
                f"{path} exists. Pass --resume to continue that run, --overwrite to discard it, or another --out."
            )
        return
    if not path.exists():
        raise SettingsError(
            f"There is no {path} to resume. Leave --resume out to start, or name its folder: --out."
        )
    checkpoint = Checkpoint.load(path)
    ours = decisive_settings(settings) | {"nproc": world_size}
    theirs = checkpoint.decisive | {"nproc": len(checkpoint.random_states)}
    differences = [f"{name} {theirs[name]} is now {ours[name]}" for name in ours if ours[name] != theirs[name]]
    if differences:
        raise SettingsError(
            f"{path} belongs to a run with other settings: {'; '.join(differences)}. "
            f"Give the same settings to resume it, or another --out to start a new run."
        )
    if checkpoint.step >= settings.limit_steps or checkpoint.elapsed_s >= settings.limit_s:
        raise SettingsError(
            f"The run in {path} is finished: {checkpoint.step} steps in {checkpoint.elapsed_s:.0f} s. "
            f"Raise --steps or --minutes to train on."
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's random generators: torch's, which are all that the recipe draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Continue the generators where `random_state` saw them."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
