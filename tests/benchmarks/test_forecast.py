"""What "auto" predicts beside what is measured: arithmetic on invented seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.bucket_size import FORECAST_COLUMNS, forecast
from benchmarks.forecast import GOODPUT, predictions
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.forecast.auto_buckets import Tuning
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.step_model import Job, Observed

SPECS = [ParamSpec(f"p{i}", 250_000, torch.float32, torch.device("cpu")) for i in range(2)]  # 1 MB each
LINK = Link(latency_s=0.1, bytes_per_s=1e6)


def _plan(*groups: list[int]) -> BucketPlan:
    return plan_from_groups(SPECS, groups, origin="by hand")


TOGETHER, APART = _plan([0, 1]), _plan([0], [1])
# Ready after 1 and 2 s. Together: 2 + 0.1 + 2. Apart: the first from 1 to 2.1, the second to 3.2.
SEEN = Observed({0: 1.0, 1: 2.0}, computed_s=2.0, gradients_complete_s=2.0, end_s=4.1)
TUNING = Tuning(LINK, TOGETHER, APART, before_s=4.1, predicted_s=3.2, seen=SEEN, measured_s=3.3)
BY_TOGETHER = np.array([5.0, 5.0, 6.0])


def test_a_step_is_predicted_from_the_default_one_of_its_round():
    by_apart = np.array([4.1, 4.1, 5.1]) / 1.02
    prediction = forecast(TUNING, APART, BY_TOGETHER, by_apart, seed=0)
    cells = [cell.format(**{k: vars(of) for k, of in prediction.items()}) for cell in FORECAST_COLUMNS.values()]
    assert cells == ["4100.00", "4019.61", "+2.0%", "+2.0% to +2.0%"]


def test_other_places_are_predicted_from_a_job_and_a_hop():
    """Four seconds of computing; without a spare core all of a message of 2 MB is exposed."""
    job, hop = Job(4.0, 2.0, {0: 1.0, 1: 2.0}, TOGETHER), Link(0.0, 1e6)
    measured = {
        (2, 1, ""): (5.0, 2.0),
        (4, 1, ""): (10.0, 2.0),
        (4, 2, "1mbit"): (10.0, 2.0),
        (2, 2, "100gbit"): (9.0, 1.0),
    }
    here, crowded, apart, busy = predictions(job, hop, measured).values()
    assert here["predicted_ms"] == pytest.approx(1e3 * (4 + 2))
    assert here["error"] == pytest.approx(6 / 5 - 1)
    assert crowded["predicted_ms"] == pytest.approx(1e3 * (2 * 4 + 2 * 1.5 * 2)), "by twice as many ranks as cores"
    assert apart["predicted_ms"] == pytest.approx(1e3 * (2 * 4 + 1.5 * 2 / (0.125 * GOODPUT)))
    assert busy["predicted_ms"] == pytest.approx(1e3 * 2 * (4 + 2)), "other programs have taken a core"
