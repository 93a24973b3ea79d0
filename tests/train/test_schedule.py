from __future__ import annotations

import pytest

from minddp.train.schedule import learning_rate, peak_learning_rate, progress
from minddp.train.settings import Settings


def test_the_rate_scales_with_the_global_batch() -> None:
    one = Settings(learning_rate=0.1)
    assert peak_learning_rate(one, 4) == pytest.approx(0.4)
    accumulating = Settings(learning_rate=0.1, accumulate=4)
    assert peak_learning_rate(accumulating, 1) == peak_learning_rate(one, 4)


def test_warm_up_rises_linearly_to_the_peak() -> None:
    settings = Settings(learning_rate=1.0, warmup_steps=4)
    rates = [learning_rate(settings, 1, step, progress=0.0) for step in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert learning_rate(Settings(learning_rate=1.0, warmup_steps=0), 1, 0, 0.0) == pytest.approx(1.0)


def test_the_cosine_falls_from_the_peak_to_the_final_fraction() -> None:
    settings = Settings(learning_rate=1.0, warmup_steps=0, final_fraction=0.2)
    rates = [learning_rate(settings, 1, 9, progress=x) for x in (0, 0.25, 0.5, 1.0)]
    assert rates == pytest.approx([1.0, 0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6, 0.2])


def test_progress_is_measured_by_the_nearer_limit() -> None:
    assert progress(Settings(steps=10), step=4, elapsed_s=1e9) == 0.4  # no clock in a run limited by steps
    assert progress(Settings(minutes=1.0), step=4, elapsed_s=45) == 0.75
    assert progress(Settings(steps=10, minutes=1.0), step=4, elapsed_s=45) == 0.75
    assert progress(Settings(steps=10, minutes=1.0), step=9, elapsed_s=45) == 0.9
    assert progress(Settings(minutes=1.0), step=4, elapsed_s=61) == 1.0
