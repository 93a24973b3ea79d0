"""The page: one HTML file that shows the typical step and needs no network.

`page.html` is a Jinja template, which includes `page.css`. There is no script.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from minddp.platform.wording import size
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.timeline import RecordedStep

MARKS = 8  # on the axis, about


def render(analysis: Analysis) -> str:
    """The page of a recording.

    Raises:
        ValueError: it holds no step.
    """
    step = analysis.typical
    rows = list(words.rows_of(step, step.ranks))
    return _environment(step).get_template("page.html").render(analysis=analysis, step=step, rows=rows)


def _environment(step: RecordedStep) -> Environment:
    """Escapes all text; knows the words of X-ray, and the places of times on the axis of `step`."""
    begin_ns, length_ns = step.begin_ns, max(1, step.end_ns - step.begin_ns)

    def at(begin: int, end: int | None = None) -> str:
        share, width = (begin - begin_ns) / length_ns, ((end or begin) - begin) / length_ns
        return f"left:{100 * share:.4f}%;width:{100 * width:.4f}%"

    loader = PackageLoader("minddp.tools.xray", "page")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.globals |= {"words": words, "size": size, "at": at, "marks": marks(length_ns)}
    environment.filters |= {"prose": prose, "unbroken": lambda text: text.replace(" ", "\u00a0")}
    return environment


def marks(length_ns: int) -> Iterator[tuple[float, str]]:
    """The round times on the axis, each as a share of the step and as a label."""
    rough = length_ns / 1e6 / MARKS
    power = 10 ** math.floor(math.log10(rough))
    apart_ms = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    for k in range(math.ceil(length_ns / 1e6 / apart_ms)):
        yield 1e6 * k * apart_ms / length_ns, f"{k * apart_ms:.6g} ms"


def prose(text: str) -> Markup:
    """Text with `names in backticks` as code."""
    return Markup(re.sub(r"`(.*?)`", r"<code>\1</code>", str(escape(text))))
