from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from minddp.tools.train.metrics import Averages, Means, MetricsLog
from minddp.tools.train.task import Task
from tests.ranks import on_ranks

NOTHING = TensorDataset(torch.zeros(0))
TASK = Task(NOTHING, NOTHING, nn.Identity)


@on_ranks(2)
def test_averages_weigh_every_target_alike(rank: int) -> None:
    """Rank 0 counts batches of 1 and 2 targets, rank 1 a batch of 5; then both one target each, and a sequence."""
    add = partial((averages := Averages(torch.device("cpu"))).add, TASK)
    right, wrong = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    if rank == 0:
        add(torch.tensor(1.0), torch.stack([right]), torch.tensor([1]))
        add(torch.tensor(2.0), torch.stack([right, wrong]), torch.tensor([1, 1]))
    else:
        add(torch.tensor(7.0), torch.stack([wrong] * 5), torch.tensor([1] * 5))
    assert averages.over_ranks() == Means(loss=(1 * 1 + 2 * 2 + 5 * 7) / 8, accuracy=2 / 8, targets=8)
    add(torch.tensor(float(rank)), torch.stack([right]), torch.tensor([1]))
    assert averages.over_ranks() == Means(loss=0.5, accuracy=1.0, targets=2)  # the first ones are not counted again
    logits = torch.eye(2).repeat(3, 1).reshape(2, 3, 2)  # predicts 0 1 0, 1 0 1
    add(torch.tensor(1.0), logits, torch.zeros(2, 3, dtype=torch.int64))
    assert averages.over_ranks() == Means(loss=1.0, accuracy=0.5, targets=2 * 6)


def test_a_resumed_log_forgets_what_will_be_written_again(tmp_path: Path) -> None:
    log = MetricsLog(path := tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        log.append("training", step)
    log.append("validation", 20)
    with path.open("a") as file:
        file.write('{"kind": "training", "st')  # killed while writing
    log.forget_after(20)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 20]
    log.forget_after(-1)
    assert path.read_text() == ""
