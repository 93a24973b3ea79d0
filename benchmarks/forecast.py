"""Does a step take as long as `minddp.forecast` predicts?

[Note: a step's prediction]
`bucket_cap_mb="auto"` observes backwards by the default plan, and predicts from these how long one takes by another
plan. The rest of a step does not depend on the plan. So a step is predicted to take as long as one by the default
plan in the same round of the race, plus what the backward is predicted to gain or lose. Any plan can be predicted
so, also those that "auto" has not chosen: a stronger check, as they are further from the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.harness import compare, estimate
from minddp.core.plan import BucketPlan
from minddp.forecast import Tuning

AIM = 0.10  #: the largest error of a prediction, as a share


def forecast(
    tuning: Tuning, plan: BucketPlan, by_default: np.ndarray, by_plan: np.ndarray, seed: int
) -> dict[str, Any]:
    """The step by `plan` that `tuning` predicts, in milliseconds, and its error against the measured one.

    `by_default` and `by_plan` are seconds per step in each round, `[rounds]`; an error is a share of the latter.
    """
    predicted = by_default + (tuning.predicted_backward_s(plan) - tuning.before_s)
    off = compare(predicted, by_plan, seed)
    return {
        "predicted_ms": dataclasses.asdict(estimate(predicted * 1e3, seed)),
        "measured_ms": dataclasses.asdict(estimate(by_plan * 1e3, seed)),
        "error": dataclasses.asdict(
            dataclasses.replace(off, median=off.median - 1, low=off.low - 1, high=off.high - 1)
        ),
        "within_aim": abs(off.median - 1) <= AIM,
    }


def by_chosen_plan(tuning: Tuning, by_default: np.ndarray, by_auto: np.ndarray) -> np.ndarray:
    """Seconds per step by the plan that "auto" has chosen, `[rounds]`.

    Where "auto" has undone its choice, that plan does not race: then the default's, plus the loss in its trial.
    """
    if tuning.is_kept:
        return by_auto
    assert tuning.measured_s is not None, "a plan is undone for what was measured"
    return by_default + (tuning.measured_s - tuning.before_s)


def forecast_cells(prediction: Mapping[str, Any]) -> list[str]:
    """The cells of a table: predicted and measured milliseconds, the error in percent, and its interval."""
    error = prediction["error"]
    return [
        f"{prediction['predicted_ms']['median']:.2f}",
        f"{prediction['measured_ms']['median']:.2f}",
        f"{error['median']:+.1%}",
        f"{error['low']:+.1%} to {error['high']:+.1%}",
    ]
