"""docs/forecast.md: its tables are what the model predicts, and the models have as many parameters as published."""

from __future__ import annotations

import inspect
import re

import pytest

from docs import forecast as page
from minddp.tools.forecast.link import Link
from minddp.tools.xray import forecast_command


def test_the_page_shows_what_is_predicted_and_was_measured():
    text = page.PAGE.read_text()
    assert page.filled(text) == text, "run `python -m docs.forecast`"


def test_the_page_lists_the_options_of_the_command():
    source, text = inspect.getsource(forecast_command), page.PAGE.read_text()
    options = re.findall(r'^    add\("([\w-]+)"', source, re.MULTILINE)
    assert re.findall(r"^\| `([\w-]+)` \|.*\|.*\|$", text, re.MULTILINE) == options
    assert all(f"| `{column}` |" in text for column in forecast_command.COLUMNS[3:])


@pytest.mark.parametrize(
    ("layers", "millions", "gmac"),
    [
        (page.vgg16(), 138.3, 15.5),
        (page.resnet([3, 4, 6, 3]), 25.5, 3.86),
        (page.resnet([3, 4, 23, 3]), 44.4, 7.57),
    ],
)
def test_layers_add_up_to_the_published_models(layers: list[page.Layer], millions: float, gmac: float):
    assert sum(of for of, _ in layers) == pytest.approx(millions, rel=0.005)
    assert sum(work for _, work in layers) / 1e3 == pytest.approx(gmac, rel=0.005)


def test_the_wire_that_a_figure_needs_is_found_again():
    for share in (0.3, 0.8, 1.0):
        figure = next(page.figures())
        again = page.Figure("", "", figure.predicted(share), figure.predicted)
        assert again.needed_share() == pytest.approx(share, rel=0.02)


def test_horovod_fuses_what_is_ready_when_the_wire_is_free():
    """Four gradients of 8 MB, ready at 1, 2, 6 and 30 ms; a message takes 1 ms for each MB."""
    job = page.job_of([(8_000_000, at_s) for at_s in (0.001, 0.002, 0.006, 0.030)], 0.05, 0.04)
    plan = page.fused(job, Link(0.0, 1e9)).plan
    assert [[slot.param for slot in bucket.slots] for bucket in plan.buckets] == [[0, 1], [2], [3]]
