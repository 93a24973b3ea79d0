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
from tests.docs.links import pictures
from tests.ranks import RankPool

LARGEST_PICTURE = 150_000


@pytest.fixture(autouse=True)
def _lessons_run_on_ranks_that_are_there(monkeypatch: pytest.MonkeyPatch, ranks: Callable[[int], RankPool]) -> None:
    def run(lesson: lessons.Lesson) -> str:
        return ranks(lesson.ranks).run(lesson.show)[0] if lesson.ranks else lesson.show(0)

    monkeypatch.setattr(lessons, "run", run)


@pytest.mark.parametrize("page", quotes.pages(), ids=lambda page: page.name)
def test_what_a_page_quotes_is_still_true(page: Path) -> None:
    assert quotes.run_cog("--check", "--diff", str(page)) == 0


def test_every_lesson_is_on_a_page() -> None:
    calls = [call for page in quotes.pages() for call in quotes.blocks(page.read_text())]
    commands = [found[1] for call in calls if (found := re.fullmatch(r'output\("(.*)"\)', call))]
    assert {quotes.lesson_in(command) for command in commands} - {None} == lessons.LESSONS.keys()


def test_every_time_on_a_page_is_one_of_the_recording() -> None:
    """A time written by hand has not been measured on any machine."""
    for page in quotes.pages():
        prose = quotes.BLOCK.sub("", page.read_text())
        assert re.findall(r"[\d.,]+ ?(?:ms|µs|seconds)\b", prose) == [], page.name


def test_every_output_and_piece_of_code_is_quoted_by_cog() -> None:
    for page in quotes.pages():
        by_hand = quotes.BLOCK.sub("", page.read_text())
        assert "```console" not in by_hand, page.name
        assert "```python" not in by_hand, page.name


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


def test_all_pictures_are_shown_and_small() -> None:
    shown = {page.parent / picture for page in quotes.pages() for picture in pictures(page.read_text())}
    assert shown == set((quotes.FOLDER / "pictures").iterdir())
    for picture in shown:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < LARGEST_PICTURE


# ------------------------------------------------------------------ the checks themselves

PAGE = """before
<!-- [[[cog output("python -m docs.learning reciprocal") ]]] -->
nothing
<!-- [[[end]]] -->
between
<!-- [[[cog code("reference/naive.py", "Naive") ]]] -->
<!-- [[[end]]] -->
<!-- [[[cog figures("naive") ]]] -->
<!-- [[[end]]] -->
after
"""


def test_filling_replaces_what_is_quoted_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert quotes.run_cog("--check", str(page)) != 0
    assert quotes.run_cog("-r", str(page)) == 0
    filled = page.read_text()
    shown = quotes.blocks(filled)
    command = "python -m docs.learning reciprocal"
    source = quotes.source_of(quotes.ROOT / "reference" / "naive.py", "Naive")
    assert "def synchronize(self) -> None:\n" in source
    assert '"""' not in source
    assert shown == {
        f'output("{command}")': f"```console\n$ {command}\n{lessons.run(lessons.LESSONS['reciprocal'])}\n```\n",
        'code("reference/naive.py", "Naive")': f"```python\n{source}```\n",
        'figures("naive")': f"*{recorded.figures('naive')}*\n",
    }
    assert quotes.BLOCK.sub("", filled) == quotes.BLOCK.sub("", PAGE)
    assert quotes.run_cog("--check", str(page)) == 0


def test_code_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"does not define `Naive\.hurry`"):
        quotes.source_of(quotes.ROOT / "reference" / "naive.py", "Naive.hurry")


def test_a_statement_that_is_gone_or_not_the_only_one_is_an_error() -> None:
    naive = quotes.ROOT / "reference" / "naive.py"
    assert quotes.statement_of(naive, "Naive.synchronize", "for ").startswith("for ")
    for beginning, count in (("while ", 0), ("self", 2)):
        with pytest.raises(LookupError, match=f"has {count} statements"):
            quotes.statement_of(naive, "Naive.synchronize", beginning)


def test_only_python_is_run_for_a_page() -> None:
    with pytest.raises(ValueError, match="only commands of `python`"):
        quotes.printed_by("rm -r x")
