from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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
