"""Hugging Face's Trainer, on a model of a few hundred parameters made from a configuration."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.compat.both import Trained, expect_same_bits

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs Transformers: pip install transformers"
)


def trainer_run(rank: int, folder: str) -> Trained:
    """Accumulation, clipping, a schedule and a checkpoint that a second Trainer resumes from."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    folder = str(Path(folder, torch.nn.parallel.DistributedDataParallel.__module__))
    random = torch.Generator().manual_seed(0)
    dataset = [
        {"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 32, (64, 8), generator=random)
    ]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )

    def trainer() -> Trainer:
        torch.manual_seed(rank)  # rank 0's weights must win
        config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2)
        return Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=dataset)

    trainer().train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))
    assert resumed.state.global_step == 4
    return Trained(type(resumed.model_wrapped), resumed.model, resumed.optimizer.optimizer.state_dict())


def test_the_trainer_trains_saves_and_resumes(pair, tmp_path: Path) -> None:
    expect_same_bits(pair, trainer_run, str(tmp_path))
