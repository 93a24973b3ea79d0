"""What is predicted beside what is measured: arithmetic on invented seconds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.forecast import GOODPUT, predictions
from minddp.core.plan import ParamSpec, plan_from_groups
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.step_model import Job

SPECS = [ParamSpec(f"p{i}", 250_000, torch.float32, torch.device("cpu")) for i in range(2)]  # 1 MB each
TOGETHER = plan_from_groups(SPECS, [[0, 1]], origin="by hand")


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
