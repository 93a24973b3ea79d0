"""The pages of docs/learning quote outputs, code, figures and links. Here all are made anew and compared."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.machine import describe
from docs.learning import pages, recorded
from docs.learning.lessons import LESSONS, Lesson
from minddp.xray.timeline import Activity
from tests.ranks import RankPool

LARGEST_PICTURE = 150_000
OTHER_PAGES = [pages.ROOT / "docs" / name for name in ("README.md", "xray.md")]
SHOWN = [(page, command) for page in pages.pages() for command in pages.outputs(page.read_text())]


def by_name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page.stem}: {command}" for page, command in SHOWN])
def test_a_command_prints_what_the_page_shows(page: Path, command: str, ranks: Callable[[int], RankPool]) -> None:
    def run(lesson: Lesson) -> str:
        return ranks(lesson.ranks).run(lesson.show)[0] if lesson.ranks else lesson.show(0)

    assert pages.output_of(command, run) == pages.outputs(page.read_text())[command]


@pytest.mark.parametrize("page", pages.pages(), ids=by_name)
def test_code_and_figures_are_those_of_the_files(page: Path) -> None:
    text = page.read_text()
    assert pages.with_figures(pages.with_code(text), recorded.facts()) == text


@pytest.mark.parametrize("page", [*pages.pages(), *OTHER_PAGES], ids=by_name)
def test_links_lead_where_they_say(page: Path) -> None:
    links = pages.links(page.read_text())
    assert links
    assert [fault for link in links if (fault := pages.fault_of(link, page))] == []


def test_every_lesson_is_on_a_page_and_every_command_exists() -> None:
    shown = {pages.lesson_in(command) for _, command in SHOWN} - {None}
    assert shown == LESSONS.keys()


def test_every_time_in_the_text_is_a_figure_of_the_recording() -> None:
    """A time written by hand would be true of no machine."""
    for page in pages.pages():
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"[\d.,]+ ?(?:ms|µs|seconds)\b(?!<!--)", prose) == [], page.name


# ------------------------------------------------------------------ recordings and pictures


@pytest.mark.parametrize("claim", recorded.CLAIMS, ids=lambda claim: claim.sentence)
def test_the_recording_shows_what_the_pages_say(claim: recorded.Claim) -> None:
    assert claim.holds(recorded.steps())


def test_the_recording_tells_its_machine_and_not_whose_it_is() -> None:
    assert json.loads(recorded.MACHINE.read_text()).keys() == describe().keys()
    for path in recorded.FOLDER.iterdir():
        assert platform.node() not in path.read_text()
    assert {rank.host for result in recorded.results() for rank in result.recording.ranks} == {"one machine"}


def test_what_is_kept_is_a_whole_step_of_both_ranks() -> None:
    for step in recorded.steps().values():
        assert step.complete
        assert [rank.rank for rank in step.ranks] == [0, 1]
        for rank in step.ranks:
            assert len(rank.ready_ns) == 10
            assert rank.parts_ns[Activity.OPTIMIZER] > 0
            assert sum(rank.parts_ns.values()) == rank.length_ns


def test_all_pictures_are_shown_and_small() -> None:
    shown = {(page.parent / picture) for page in pages.pages() for picture in pages.pictures(page.read_text())}
    assert shown == set((pages.FOLDER / "pictures").iterdir())
    for picture in shown:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < LARGEST_PICTURE


# ------------------------------------------------------------------ the checks themselves

PAGE = """
# A heading, of `two` parts
```console
$ python -m docs.learning reciprocal
nothing
```
It took 7 ms<!-- naive.step --> and 3%<!-- naive.hidden -->.

<!-- code: reference/naive.py Naive -->
```python
pass
```
"""


def test_filling_replaces_outputs_code_and_figures_and_nothing_else() -> None:
    facts = {"naive.step": "12.5 ms", "naive.hidden": "0%"}
    filled = pages.with_figures(pages.with_code(pages.with_outputs(PAGE, lambda command: f"of {command}\n")), facts)
    source = pages.source_of(pages.ROOT / "reference" / "naive.py", "Naive")
    assert "def synchronize(self) -> None:\n" in source
    assert '"""' not in source
    assert filled == (
        PAGE.replace("nothing", "of python -m docs.learning reciprocal")
        .replace("7 ms", "12.5 ms")
        .replace("3%", "0%")
        .replace("pass\n", source)
    )


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("[`Bucket.pack`](../../minddp/core/bucket.py)", None),
        (
            "[`Bucket.unheard_of`](../../minddp/core/bucket.py)",
            "../../minddp/core/bucket.py does not define Bucket.unheard_of",
        ),
        ("[`LARGE_BYTES`](../../minddp/core/packing.py)", None),
        ("[`bucket.py`](../../minddp/core/bucket.py)", None),
        ("[gone](../../minddp/gone.py)", "../../minddp/gone.py does not exist"),
        ("[`[Note: launch order]`](../../minddp/core/plan.py)", None),
        (
            "[`[Note: lunch order]`](../../minddp/core/plan.py)",
            "../../minddp/core/plan.py has no [Note: lunch order]",
        ),
        ("[a heading](#a-heading-of-two-parts)", None),
        ("[no heading](#another)", " has no heading #another"),
        ("[torch](https://pytorch.org)", None),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, fault: str | None) -> None:
    page = pages.FOLDER / "README.md" if "../" in link else tmp_path / "page.md"
    if page.parent == tmp_path:
        page.write_text(PAGE)
    [found] = pages.links(link)
    assert pages.fault_of(found, page) == fault


def test_code_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"does not define `Naive\.hurry`"):
        pages.source_of(pages.ROOT / "reference" / "naive.py", "Naive.hurry")


def test_only_python_is_run_for_a_page() -> None:
    with pytest.raises(ValueError, match="only commands of `python`"):
        pages.printed_by("rm -r x")
