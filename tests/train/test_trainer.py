from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minddp.train.checkpoint import check_checkpoint
from minddp.train.settings import GPTOptions, Settings, SettingsError, WrapperOptions
from minddp.train.trainer import Trainer
from tests.ranks import RankFailure
from tests.train.runs import assert_same_bits, final_bits, records, tiny, train_here, world_here


def _interrupted_after(rank: int, settings: Settings, step: int) -> None:
    """A run that checkpoints after `step` and then is killed: no second checkpoint is ever written."""
    trainer = Trainer(settings, world_here(rank))
    batches = iter(trainer.batches)
    for _ in range(step):
        trainer.optimizer_step(batches)
    trainer.save(settings.folder / "checkpoint.pt")
    for _ in range(2):
        trainer.optimizer_step(batches)


@pytest.mark.parametrize(
    ("ddp", "world_size", "changes"),
    [
        ("minddp", 2, {"accumulate": 2}),
        # From three ranks on, sums depend on the place in the bucket: small buckets make the rebuild visible.
        ("minddp", 3, {"wrapper": WrapperOptions(bucket_cap_mb=0.001)}),
        ("torch", 3, {"wrapper": WrapperOptions(bucket_cap_mb=0.001)}),
        ("minddp", 3, {"wrapper": WrapperOptions(gradient_as_bucket_view=True)}),
        # BatchNorm, and an epoch's end between the interruption and the end.
        ("minddp", 2, {"task": "digits", "gpt": GPTOptions(), "batch_size": 100, "steps": 12}),
    ],
    ids=["accumulate", "buckets", "buckets-torch", "views", "digits"],
)
def test_a_resumed_run_ends_with_the_same_bits(
    ranks, tmp_path: Path, ddp: str, world_size: int, changes: dict[str, Any]
) -> None:
    if changes.get("task") == "digits":
        pytest.importorskip("sklearn")
    whole = tiny(tmp_path / "whole", ddp=ddp, **changes)
    ranks(world_size).run(train_here, whole)

    broken = dataclasses.replace(whole, out=tmp_path / "broken")
    broken.folder.mkdir()
    ranks(world_size).run(_interrupted_after, broken, 3)
    ranks(world_size).run(train_here, dataclasses.replace(broken, resume=True))

    assert_same_bits(final_bits(broken.folder), final_bits(whole.folder))
    later = [record for record in records(whole.folder, "training") if record["step"] > 3]
    assert records(broken.folder, "training")[-1] == later[-1]
    assert records(broken.folder, "validation")[-1] == records(whole.folder, "validation")[-1]


def _train_two(rank: int, one: Settings, other: Settings, steps: int) -> float:
    """The largest difference between the weights of two runs."""
    trainers = [Trainer(settings, world_here(rank)) for settings in (one, other)]
    streams = [iter(trainer.batches) for trainer in trainers]
    for _ in range(steps):
        for trainer, batches in zip(trainers, streams, strict=True):
            trainer.optimizer_step(batches)
    pairs = zip(*(trainer.model.parameters() for trainer in trainers), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_accumulating_sums_the_same_gradient_as_a_larger_batch(ranks, tmp_path: Path) -> None:
    gpt = dataclasses.replace(tiny(tmp_path).gpt, dropout=0.0)
    large = tiny(tmp_path, ddp="torch", gpt=gpt, batch_size=4, learning_rate=2e-3)
    small = dataclasses.replace(large, batch_size=2, accumulate=2, learning_rate=1e-3)
    other = dataclasses.replace(large, seed=1)
    assert max(ranks(2).run(_train_two, large, small, 4)) < 1e-5
    assert min(ranks(2).run(_train_two, large, other, 4)) > 1e-3  # the comparison can fail


def _gradients_of_two_passes(rank: int, settings: Settings) -> list[torch.Tensor]:
    """One parameter's gradient after a pass that is not the step's last, and after the last."""
    trainer = Trainer(settings, world_here(rank))
    batches, weight = iter(trainer.batches), trainer.model.head.weight
    gradients = []
    for is_last in (False, True):
        trainer._forward_backward(next(batches), is_last)
        gradients.append(weight.grad.clone())
    return gradients


@pytest.mark.parametrize("ddp", ["torch", "minddp"])
def test_gradients_travel_in_the_last_pass_only(ranks, tmp_path: Path, ddp: str) -> None:
    first, second = ranks(2).run(_gradients_of_two_passes, tiny(tmp_path, ddp=ddp, accumulate=2))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def _weights_and_dropout(rank: int, settings: Settings) -> tuple[list[torch.Tensor], torch.Tensor]:
    trainer = Trainer(settings, world_here(rank))
    dropped = nn.functional.dropout(torch.ones(64), 0.5)
    batches = iter(trainer.batches)
    for _ in range(3):
        trainer.optimizer_step(batches)
    return [param.detach() for param in trainer.model.parameters()], dropped


def test_ranks_share_the_weights_but_not_the_dropout(ranks, tmp_path: Path) -> None:
    (weights_0, dropped_0), (weights_1, dropped_1) = ranks(2).run(_weights_and_dropout, tiny(tmp_path, ddp="torch"))
    assert_same_bits(weights_0, weights_1)
    assert not torch.equal(dropped_0, dropped_1)


def _validate_own_statistics(rank: int, settings: Settings) -> tuple[float, float]:
    """Validation losses when all ranks have the same statistics, and when rank 1 has others."""
    trainer = Trainer(settings, world_here(rank))
    together = trainer.validate().loss
    for buffer in trainer.model.buffers():
        if rank == 1 and buffer.is_floating_point():
            buffer.fill_(5.0)
    return together, trainer.validate().loss


def test_validation_judges_the_model_of_rank_0(ranks, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    settings = Settings(task="digits", out=tmp_path, ddp="torch", device="cpu", validation_samples=20)
    for together, apart in ranks(2).run(_validate_own_statistics, settings):
        assert apart == together


def test_the_digits_are_learned(ranks, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    settings = Settings(task="digits", out=tmp_path, ddp="torch", device="cpu", steps=80, learning_rate=1e-2)
    assert ranks(2).run(train_here, settings) == ["finished"] * 2
    last = records(tmp_path, "validation")[-1]
    assert last["accuracy"] > 0.9
    assert last["targets"] == 360


def test_a_time_limit_is_kept_by_rank_0s_clock(ranks, tmp_path: Path) -> None:
    settings = tiny(tmp_path, ddp="torch", steps=None, minutes=0.5 / 60)
    assert ranks(2).run(train_here, settings) == ["finished"] * 2
    assert final_bits(tmp_path)["step"] == records(tmp_path, "validation")[-1]["step"] > 1


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(ranks, tmp_path: Path) -> None:
    settings = tiny(tmp_path, ddp="torch", steps=50, warmup_steps=0, learning_rate=1e30)
    with pytest.raises(RankFailure, match=r"The training loss is (nan|inf) at step"):
        ranks(2).run(train_here, settings)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_checkpoint_must_fit_the_settings(ranks, tmp_path: Path) -> None:
    settings = tiny(tmp_path, ddp="torch")
    with pytest.raises(SettingsError, match=r"There is no .*checkpoint.pt to resume"):
        check_checkpoint(dataclasses.replace(settings, resume=True), world_size=2)
    check_checkpoint(settings, world_size=2)
    ranks(2).run(train_here, settings)

    with pytest.raises(SettingsError, match=r"exists\. Pass --resume .* --overwrite"):
        check_checkpoint(settings, world_size=2)
    check_checkpoint(dataclasses.replace(settings, overwrite=True), world_size=2)

    resumed = dataclasses.replace(settings, resume=True)
    with pytest.raises(SettingsError, match="finished: 6 steps"):
        check_checkpoint(resumed, world_size=2)
    check_checkpoint(dataclasses.replace(resumed, steps=7, log_every=3, timeout_s=9.0), world_size=2)
    with pytest.raises(SettingsError, match="batch_size 2 is now 3; nproc 2 is now 4"):
        check_checkpoint(dataclasses.replace(resumed, steps=7, batch_size=3), world_size=4)
