"""A training on one rank, in a group of its own."""

from __future__ import annotations

import copy
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp.tools.job.launcher import Stopped
from minddp.tools.train import launch
from minddp.tools.train.checkpoint import CheckpointFiles, find_checkpoint
from minddp.tools.train.settings import Settings, SettingsError
from minddp.tools.train.task import load_task
from minddp.tools.train.trainer import Trainer
from minddp.tools.train.world import World
from tests.tools.train.runs import TINY_GPT, assert_same_bits, tiny


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()


def after_a_step(world: World, out: Path, **changes: Any) -> Trainer:
    settings = tiny(out, **{"ddp": "torch", "task_options": TINY_GPT, **changes})
    trainer = Trainer(settings, world, load_task(settings))
    trainer.optimizer_step()
    return trainer


# ------------------------------------------------------------------ a step


@pytest.mark.parametrize(
    ("changes", "others", "tolerance"),
    [
        # Clipped after each backward, thus before averaging, the passes of a step would count by other shares.
        ({"accumulate": 2, "clip_norm": 1e-3}, {"accumulate": 2, "clip_norm": None}, 0.0),
        ({"accumulate": 2, "batch_size": 2}, {"accumulate": 1, "batch_size": 4}, 1e-4),
        ({"precision": "fp16"}, {}, 0.05),
    ],
    ids=["before it is clipped", "a mean over passes", "without the scale of the loss"],
)
def test_the_norm_is_that_of_the_whole_gradient(
    world: World, tmp_path: Path, changes: dict[str, Any], others: dict[str, Any], tolerance: float
) -> None:
    one, other = (float(after_a_step(world, tmp_path, **options).gradient_norm) for options in (changes, others))
    assert one == pytest.approx(other, rel=tolerance, abs=0.0)
    assert other > 1e-2


def test_what_is_restored_goes_on_to_the_same_bits(world: World, tmp_path: Path) -> None:
    """Dropout draws random numbers, and the scale of the loss has changed."""
    options = {"precision": "fp16", "task_options": (*TINY_GPT, "dropout=0.2")}
    whole = after_a_step(world, tmp_path, **options)
    whole.scaler.update(new_scale=2.0**10)
    state = whole.state()
    state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    whole.optimizer_step()
    resumed = Trainer(whole.settings, world, whole.task)
    resumed.restore(state)
    resumed.optimizer_step()
    assert_same_bits(resumed.state(), whole.state())
    other = Trainer(dataclasses.replace(whole.settings, weight_decay=0.2), world, whole.task)
    other.restore(state)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.2  # the settings, not those of the checkpoint


def test_a_step_that_overflows_is_left_out_and_lowers_the_scale(world: World, tmp_path: Path) -> None:
    trainer = after_a_step(world, tmp_path, precision="fp16")
    trainer.scaler.update(new_scale=2.0**40)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.optimizer_step()
    assert_same_bits(trainer.model.state_dict(), before)
    assert trainer.state()["scaler"]["scale"] == 2.0**39


def test_an_option_that_the_wrapper_lacks_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--ddp torch --ddp-options transport=nccl: got an unexpected keyword"):
        after_a_step(world, tmp_path, ddp_options=("transport=nccl",))


# ------------------------------------------------------------------ to continue, and to end


def test_an_old_run_is_neither_continued_nor_discarded_unasked(world: World, tmp_path: Path) -> None:
    settings = Settings(out=tmp_path)
    files = CheckpointFiles(tmp_path, keep=1)
    files.check_resume(settings)
    assert find_checkpoint(files, world) is None
    files.folder.mkdir()
    (files.folder / "step-00000003.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(SettingsError, match=r"already contains a run\. Pass --resume auto"):
        files.check_resume(settings)
    files.check_resume(Settings(out=tmp_path, resume="auto"))
    with pytest.raises(SettingsError, match=r"All checkpoints in .* are damaged"):
        find_checkpoint(files, world)


@pytest.mark.parametrize(
    ("name", "status"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 128 + signal.SIGINT), ("finished", 0)]
)
def test_the_status_says_whether_to_start_the_run_again(
    name: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: object) -> None:
        if name != "finished":
            raise Stopped(signal.Signals[name])

    monkeypatch.setattr(launch, "launch", launched)
    assert launch.main(["--out", str(tmp_path)]) == status


def test_ranks_that_are_started_again_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(launch, "launch", lambda *words: started.append(words))
    assert launch.main(["--out", str(tmp_path), "--max-restarts", "2"]) == 0
    ((_, _, (_, *words), max_restarts),) = started
    assert launch.parse(words).resume == "auto"
    assert max_restarts == 2
