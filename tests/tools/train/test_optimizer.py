from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from minddp.tools.train.optimizer import learning_rate
from minddp.tools.train.settings import Settings


def test_the_rate_scales_with_the_global_batch() -> None:
    one = Settings(learning_rate=0.1, warmup_steps=0)
    assert learning_rate(one, 4, 0) == pytest.approx(0.4)
    assert learning_rate(dataclasses.replace(one, accumulate=4), 1, 0) == pytest.approx(0.4)


def test_warm_up_rises_linearly_to_the_peak() -> None:
    settings = Settings(learning_rate=1.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(settings, 1, step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {0: 1.0, 25: 0.02 + 0.98 * (1 + 0.5**0.5) / 2, 50: 0.51, 100: 0.02}),
        ("constant", {0: 1.0, 50: 1.0, 100: 1.0}),
    ],
)
def test_the_decay_by_step(schedule: Any, expected: dict[int, float]) -> None:
    settings = Settings(schedule=schedule, learning_rate=1.0, warmup_steps=0, steps=100)
    assert {step: learning_rate(settings, 1, step) for step in expected} == pytest.approx(expected)
