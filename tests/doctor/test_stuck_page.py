"""docs/stuck.md shows real outputs: the words that `tests/watchdog` asserts, scenario by scenario."""

from __future__ import annotations

import re

import pytest

from tests.doctor.stuck_page import PAGE, anonymous, blocks, excerpt, filled
from tests.watchdog import test_stuck
from tests.watchdog.stuck import SCENARIOS


def proven() -> list[tuple[str, str]]:
    """(scenario, pattern of what a waiting rank says), taken from the tests that play the scenarios."""
    raised = test_stuck.test_who_waits_learns_that_the_faulty_rank_will_not_come.pytestmark[0].args[1]
    reported = test_stuck.test_while_the_faulty_rank_lives_its_doings_are_reported.pytestmark[0].args[1]
    return [*raised, *((name, re.escape(words)) for name, words in reported)]


@pytest.mark.parametrize(("scenario", "pattern"), proven())
def test_the_page_shows_what_is_said(scenario: str, pattern: str) -> None:
    assert re.search(pattern, blocks(PAGE.read_text())[scenario])


def test_every_scenario_is_on_the_page() -> None:
    assert SCENARIOS.keys() <= blocks(PAGE.read_text()).keys()


def test_the_doctor_on_the_page_checked_everything() -> None:
    shown = blocks(PAGE.read_text())
    assert "collectives" in shown["minddp doctor --nproc-per-node 2"]
    assert all("Traceback" not in output and output.strip() for output in shown.values())


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text())
    assert links
    for link in links:
        assert (PAGE.parent / link).exists(), link


def test_blocks_are_replaced_and_nothing_else() -> None:
    page = "before\n<!-- played: dies -->\n\n```text\nold\n```\nafter\n```text\nkept\n```\n"
    assert blocks(page) == {"dies": "old\n"}
    assert filled(page, {"dies": "new\n"}) == page.replace("old", "new")


def test_an_excerpt_is_the_last_warning_and_the_error() -> None:
    output = (
        "Stuck: Rank 1 has exited.\n  rank 0: waits\nreports:\nWaited for 1 s so far. A.\nWaited for 2 s so far. B."
    )
    assert excerpt({0: "went on\nreports:", 2: output}) == (
        "Waited for 2 s so far. B.\n\nStuck: Rank 1 has exited.\n  rank 0: waits\n"
    )
    with pytest.raises(RuntimeError, match="No rank got stuck"):
        excerpt({0: "went on\nreports:"})


def test_folders_of_the_build_are_left_out() -> None:
    assert anonymous("[/build/pytorch/third_party/gloo/gloo/pair.cc:1] x") == "[gloo/pair.cc:1] x"
