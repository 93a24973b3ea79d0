"""docs/stuck.md shows real outputs: the words that `tests/tools/watchdog` asserts, scenario by scenario."""

from __future__ import annotations

import re

import pytest

from docs.learning.quotes import blocks
from tests.tools.doctor.stuck_page import PAGE, anonymous
from tests.tools.watchdog.stuck import SCENARIOS
from tests.tools.watchdog.time_to_diagnosis import default_limit_s


def shown_by(function: str) -> dict[str, str]:
    """The outputs that calls of `function` have left on the page, by the argument of the call."""
    call = re.compile(rf'{function}\("(.*)"\)')
    outputs = {}
    for code, shown in blocks(PAGE.read_text()).items():
        match = call.fullmatch(code)
        if match is not None:
            outputs[match[1]] = shown.removeprefix("```text\n").removesuffix("```\n")
    return outputs


PATTERNS = [(name, words) for name, it in SCENARIOS.items() for words in (it.cause, it.end) if words]


@pytest.mark.parametrize(("scenario", "pattern"), PATTERNS)
def test_the_page_shows_the_asserted_words(scenario: str, pattern: str) -> None:
    assert re.search(pattern, shown_by("played")[scenario])


def test_every_scenario_is_on_the_page() -> None:
    assert SCENARIOS.keys() == shown_by("played").keys()


def test_the_page_shows_a_cause_within_20_seconds_for_every_scenario() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) s \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(SCENARIOS)
    assert all(float(seconds) <= 20 for _, seconds in rows)
    assert default_limit_s() == 10


def test_the_doctor_on_the_page_checked_everything() -> None:
    shown = shown_by("ran")
    assert "link: An all-reduce takes" in shown["minddp doctor"]
    outputs = [*shown.values(), *shown_by("played").values()]
    assert all("Traceback" not in output and output.strip() for output in outputs)


def test_folders_of_the_build_are_left_out() -> None:
    assert anonymous("[/build/pytorch/third_party/gloo/gloo/pair.cc:1] x") == "[gloo/pair.cc:1] x"
