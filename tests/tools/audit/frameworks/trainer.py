"""Transformers' Trainer on sequences of unequal length; `apart` averages each rank's tokens apart."""

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main(folder: str, apart: bool) -> None:
    torch.set_num_threads(1)
    dice = torch.Generator().manual_seed(0)
    examples = []
    for number in range(64):
        tokens = torch.randint(0, 32, (8,), generator=dice)
        labels = tokens.clone()
        labels[8 - 5 * (number // 2 % 2) :] = -100  # a batch is 2 examples, and rank 1 has every second batch
        examples.append({"input_ids": tokens, "labels": labels})
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        average_tokens_across_devices=not apart,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=examples).train()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder, "apart" in sys.argv)
