"""The pages of docs/learning quote outputs, code and figures. Here cog makes them anew and compares."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.machine import describe
from docs.learning import lessons, quotes, recorded
from minddp.tools.xray.timeline import Activity
from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def _lessons_run_on_ranks_that_are_there(monkeypatch: pytest.MonkeyPatch, ranks: Callable[[int], RankPool]) -> None:
    def run(lesson: lessons.Lesson) -> str:
        return ranks(lesson.ranks).run(lesson.show)[0] if lesson.ranks else lesson.show(0)

    monkeypatch.setattr(lessons, "run", run)


@pytest.mark.slow
@pytest.mark.parametrize("page", quotes.pages(), ids=lambda page: page.name)
def test_what_a_page_quotes_is_still_true(page: Path) -> None:
    assert quotes.run_cog("--check", "--diff", str(page)) == 0


def test_every_lesson_is_on_a_page() -> None:
    calls = [call for page in quotes.pages() for call in quotes.blocks(page.read_text())]
    commands = [found[1] for call in calls if (found := re.fullmatch(r'output\("(.*)"\)', call))]
    assert {quotes.lesson_in(command) for command in commands} - {None} == lessons.LESSONS.keys()


def test_every_output_piece_of_code_and_time_is_quoted_by_cog() -> None:
    """A time written by hand has not been measured on any machine."""
    for page in quotes.pages():
        by_hand = quotes.BLOCK.sub("", page.read_text())
        assert re.findall(r"```console|```python|[\d.,]+ ?(?:ms|µs|seconds)\b", by_hand) == [], page.name


# ------------------------------------------------------------------ recordings and pictures


@pytest.mark.parametrize("claim", recorded.CLAIMS, ids=lambda claim: claim.sentence)
def test_the_recording_shows_what_the_pages_say(claim: recorded.Claim) -> None:
    assert claim.holds(recorded.steps())


def test_the_recording_describes_its_machine_without_its_name() -> None:
    assert json.loads(recorded.MACHINE.read_text()).keys() == describe().keys()
    for path in recorded.FOLDER.iterdir():
        assert platform.node() not in path.read_text()
    assert {rank.host for result in recorded.results() for rank in result.recording.ranks} == {"one machine"}


def test_a_recording_is_a_whole_step_of_both_ranks() -> None:
    for step in recorded.steps().values():
        assert [rank.rank for rank in step.ranks] == [0, 1]
        for rank in step.ranks:
            assert len(rank.ready_ns) == 10
            assert rank.parts_ns[Activity.OPTIMIZER] > 0
            assert sum(rank.parts_ns.values()) == rank.length_ns
