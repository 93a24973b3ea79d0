from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minddp.xray.analysis import Analysis
from minddp.xray.page.payload import payload
from minddp.xray.result import Result
from tests.xray.made_up import Rank, layout, recording

MADE = recording([Rank(), Rank(late_ms=1)], layout([[1], [1]]))


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step\.pdf.*must be one of \.html, \.json, \.png"):
        Result(MADE).save(tmp_path / "step.pdf")


def test_without_a_step_nothing_is_written(tmp_path: Path) -> None:
    empty = replace(MADE, ranks=(replace(MADE.ranks[0], events=()),))
    with pytest.raises(ValueError, match="No step was recorded"):
        Result(empty).save(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = Result(MADE, is_first=False)
    elsewhere.save(tmp_path / "step.html")
    elsewhere.compare(elsewhere).save(tmp_path / "step.html")
    elsewhere.explain()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_picture_has_pixels_of_every_meaning(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import image
    from matplotlib.colors import to_rgb

    from minddp.xray.picture import EXPOSED, FILL, WIRE

    Result(MADE).save(tmp_path / "step.png")
    Result(MADE).compare(Result(MADE)).save(tmp_path / "two.png")
    pixels = image.imread(tmp_path / "step.png")
    for color in (EXPOSED, WIRE, *FILL.values()):
        wanted = matplotlib.colors.to_rgba_array(color)[0]
        if color in ("#94aed3",):  # no buffers and no rebuild in this step
            continue
        assert (abs(pixels - wanted).max(axis=2) < 0.02).any(), color
    assert to_rgb(WIRE) != to_rgb(EXPOSED)
    assert image.imread(tmp_path / "two.png").shape[0] > pixels.shape[0]


def test_the_picture_draws_buckets_as_the_page_does() -> None:
    """What waits is hatched and what moves is solid, green or red, from the same moment to the same moment."""
    pytest.importorskip("matplotlib")
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    from minddp.xray.picture import EXPOSED, WIRE, drawn

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
    (step,) = payload([Analysis(made)])["exhibits"][0]["steps"]
    on_page = {tuple(s) for rank in step["ranks"] for bucket in rank["buckets"] for s in bucket["stretches"]}
    assert drawn_stretches == on_page
    kinds = {(moves, exposed) for _, _, moves, exposed in drawn_stretches}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
