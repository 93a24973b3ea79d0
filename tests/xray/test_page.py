from __future__ import annotations

import json
import re
from dataclasses import replace

from minddp.xray.analysis import Analysis
from minddp.xray.page import render
from minddp.xray.page.payload import payload
from minddp.xray.recording import Recording
from minddp.xray.timeline import Activity
from tests.xray.made_up import MIB, Rank, Wire, layout, recording

MADE = recording([Rank(), Rank(late_ms=4)], layout([[1, 1], [2]]), steps=2, wire=Wire(bytes_per_ms=MIB / 2))


def test_the_page_asks_nobody_for_anything() -> None:
    page = render([Analysis(MADE)])
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "@import" not in page
    assert re.sub(r"http://www\.w3\.org/2000/svg", "", page).count("http") == 1  # http-equiv
    assert "default-src 'none'" in page
    assert "{{" not in page


def test_names_cannot_break_the_page() -> None:
    evil = layout([[1]], names=["</script><b>&\"'{{JS}}"])
    page = render([Analysis(recording([Rank()], evil, title="<i>&</i>"))])
    assert page.count("</script>") == 2
    assert "<title>&lt;i&gt;&amp;&lt;/i&gt;" in page


def test_the_payload_is_the_step_in_milliseconds() -> None:
    (exhibit,) = json.loads(json.dumps(payload([Analysis(MADE)])))["exhibits"]
    step = exhibit["steps"][exhibit["typical"]]
    assert [rank["begin"] for rank in step["ranks"]] == [0, 4]
    spans = step["ranks"][0]["spans"]
    assert spans[0] == [list(Activity).index(Activity.FORWARD), 0, 10, -1]
    assert step["ranks"][0]["backwardEnd"] == 31
    assert sum(step["ranks"][0]["parts"]) == step["ranks"][0]["end"]


def test_buckets_wait_and_move_one_after_the_other() -> None:
    for step in payload([Analysis(MADE)])["exhibits"][0]["steps"]:
        for rank in step["ranks"]:
            edges = [t for b in rank["buckets"] for t in (b["pending"], b["begin"], b["end"])]
            assert edges == sorted(edges)
            assert all(bucket["launched"] <= bucket["pending"] for bucket in rank["buckets"])


def test_several_recordings_come_without_predictions() -> None:
    both = payload([Analysis(MADE), Analysis(MADE)])["exhibits"]
    assert [exhibit["plans"] for exhibit in both] == [[], []]
    assert payload([Analysis(MADE)])["exhibits"][0]["plans"]


def test_a_wrapper_without_a_plan_is_not_told_to_have_another() -> None:
    (exhibit,) = payload([Analysis(replace(MADE, has_plan=False))])["exhibits"]
    assert exhibit["plans"] == []
    assert "Pass" not in exhibit["suggestion"]


def test_a_step_that_was_cut_short_can_be_shown() -> None:
    cut = Analysis(interrupted(MADE))
    (exhibit,) = payload([cut])["exhibits"]
    assert "did not come to its end" in exhibit["steps"][0]["headline"]
    assert exhibit["steps"][0]["sentences"] == []
    assert render([cut])


def interrupted(made: Recording) -> Recording:
    ranks = []
    for rank in made.ranks:
        events = rank.events[: len(rank.events) // 5]
        ranks.append(replace(rank, events=events, stopped_ns=events[-1].t_ns, error="ValueError: no"))
    return replace(made, ranks=tuple(ranks))
