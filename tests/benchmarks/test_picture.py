"""The picture of a step: the colours and the places of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.result import Result
from tests.tools.xray.made_up import Rank, layout, recording

MADE = recording([Rank(), Rank(late_ms=1)], layout([[1], [1]]))


def test_a_picture_has_pixels_of_every_meaning(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import image
    from matplotlib.colors import to_rgb

    from benchmarks.picture import EXPOSED, FILL, WIRE, main, save_picture

    Result(MADE).save(tmp_path / "step.json")
    main(tmp_path / "step.json", tmp_path / "step.png")
    save_picture([Result(MADE), Result(MADE)], tmp_path / "two.png")
    pixels = image.imread(tmp_path / "step.png")
    for color in (EXPOSED, WIRE, *FILL.values()):
        wanted = matplotlib.colors.to_rgba_array(color)[0]
        if color == "#94aed3":  # no buffers in this step
            continue
        assert (abs(pixels - wanted).max(axis=2) < 0.02).any(), color
    assert to_rgb(WIRE) != to_rgb(EXPOSED)
    assert image.imread(tmp_path / "two.png").shape[0] > pixels.shape[0]


def test_the_picture_draws_buckets_as_the_page_does() -> None:
    """What waits is hatched and what moves is solid, green or red, from the same moment to the same moment."""
    pytest.importorskip("matplotlib")
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    from benchmarks.picture import EXPOSED, WIRE, drawn

    # Buckets that wait for a rank, behind backward and not, and one that queues meanwhile.
    made = recording([Rank(), Rank(late_ms=12)], layout([[1, 1], [2], [0.1]]))
    (axes,) = drawn([Analysis(made)]).axes
    drawn_stretches = set()
    for shape in (shape for shape in axes.collections if isinstance(shape, PolyCollection)):
        waits = shape.get_hatch() is not None
        colour = tuple((shape.get_edgecolor() if waits else shape.get_facecolor())[0][:3])
        if colour in (to_rgb(WIRE), to_rgb(EXPOSED)):
            place = shape.get_paths()[0].get_extents()
            drawn_stretches.add((round(place.x0, 3), round(place.x1, 3), not waits, colour == to_rgb(EXPOSED)))
    step = Analysis(made).typical
    assert drawn_stretches == {
        (round((begin_ns - step.begin_ns) / 1e6, 3), round((end_ns - step.begin_ns) / 1e6, 3), moves, exposed)
        for rank in step.ranks
        for bucket in rank.buckets
        for begin_ns, end_ns, moves, exposed in step.stretches(bucket.index, rank)
    }
    kinds = {(moves, exposed) for _, _, moves, exposed in drawn_stretches}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
