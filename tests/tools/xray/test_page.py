from __future__ import annotations

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

import minddp.tools.xray.page
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.page import SCRIPTS, render
from minddp.tools.xray.page.payload import payload
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity
from tests.tools.xray.made_up import MIB, Rank, Wire, layout, recording

MADE = recording([Rank(), Rank(late_ms=4)], layout([[1, 1], [2]]), steps=2, wire=Wire(bytes_per_ms=MIB / 2))


STILL, LATE = Activity.EXPOSED, "  waiting for a slower rank"


def test_the_page_needs_no_network() -> None:
    page = render([Analysis(MADE)])
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "@import" not in page
    assert page.count("http") == 1  # http-equiv
    assert "default-src 'none'" in page
    assert not re.search(r"{{[A-Z]", page)


def test_names_cannot_break_the_page() -> None:
    evil = "</script><b>&\"'{{JS}}"
    page = render([Analysis(recording([Rank()], layout([[1]], names=[evil]), title="<i>&{{DATA}}</i>"))])
    assert page.count("</script>") == 2
    assert "<title>&lt;i&gt;&amp;{{DATA}}&lt;/i&gt;" in page
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    (step,) = json.loads(data)["exhibits"][0]["steps"]
    assert step["ranks"][0]["buckets"][0]["stages"][0][2] == f"its last gradient is `{evil}`"


def test_all_files_of_the_page_are_in_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["minddp.tools.xray.page"]
    names = {file.name for file in Path(minddp.tools.xray.page.__file__).parent.iterdir() if file.is_file()}
    of_page = {name for name in names if not name.endswith(".py")}
    assert of_page == {name for name in of_page if any(fnmatch(name, pattern) for pattern in patterns)}
    assert set(SCRIPTS) == {name for name in of_page if name.endswith(".js")}


def test_the_payload_is_the_step_in_milliseconds() -> None:
    (exhibit,) = json.loads(json.dumps(payload([Analysis(MADE)])))["exhibits"]
    step = exhibit["steps"][exhibit["typical"]]
    assert [rank["spans"][0][1] for rank in step["ranks"]] == [0, 4]
    spans = step["ranks"][0]["spans"]
    assert spans[0] == [list(Activity).index(Activity.FORWARD), 0, 10, -1]
    assert step["ranks"][0]["backwardEnds"] == [31]
    rows = {label: float(times[0].split()[0]) for label, _, *times in step["table"][:-2]}
    assert rows.pop("step") == pytest.approx(sum(end - begin for _, begin, end, _ in spans), abs=0.05)
    assert sum(rows.values()) == pytest.approx(spans[-1][2] - spans[0][1] + rows[LATE], abs=0.05)


def test_buckets_wait_and_move_one_after_the_other() -> None:
    for step in payload([Analysis(MADE)])["exhibits"][0]["steps"]:
        for rank in step["ranks"]:
            edges = [t for b in rank["buckets"] for begin, end, *_ in b["stretches"] for t in (begin, end)]
            assert edges == sorted(edges)


def test_a_bucket_is_divided_where_its_rank_begins_to_be_blocked() -> None:
    """Each message takes 5 ms; bucket 0 leaves rank 1 at 28 and 1/3 ms, and rank 0 has computed all at 31 ms."""
    first = payload([Analysis(MADE)])["exhibits"][0]["steps"][0]["ranks"][0]["buckets"][0]
    assert first["stretches"] == [
        [24.333, 28.333, 0, 0],  # it waits for rank 1
        [28.333, 31, 1, 0],
        [31, 33.333, 1, 1],
    ]
    assert first["stages"][-1][2].endswith("; 2.33 ms of it exposed")
    assert first["awaited"] == "2.33 ms"


def test_the_stretches_of_buckets_add_up_to_the_figures_of_their_rank() -> None:
    made = Analysis(MADE)
    for shown, step in zip(payload([made])["exhibits"][0]["steps"], made.steps, strict=True):
        rows = {label: cells for label, _, *cells in shown["table"]}
        for place, (drawn, rank) in enumerate(zip(shown["ranks"], step.ranks, strict=True)):
            moving = [s for bucket in drawn["buckets"] for s in bucket["stretches"] if s[2]]
            exposed = sum(end - begin for begin, end, _, is_exposed in moving if is_exposed)
            overlap = 1 - exposed / sum(s[1] - s[0] for s in moving)
            assert step.overlap(rank) == pytest.approx(overlap, abs=0.001)
            assert rows["communication hidden"][place] == f"{100 * overlap:.0f}%"
            still, waits = (float(rows[name][place].split()[0]) for name in (STILL.value, LATE))
            last = max(shown["ranks"], key=lambda other: other["backwardEnds"])
            spans = [end - begin for kind, begin, end, _ in last["spans"] if kind == list(Activity).index(STILL)]
            assert waits == pytest.approx(still - sum(spans), abs=0.02)
            assert shown["exposed"] == pytest.approx(sum(spans), abs=0.01)


def test_a_bucket_queues_for_the_one_before_it() -> None:
    """10 ms of bucket 0, 3 ms past the launch of bucket 1."""
    plan = layout([[3], [0.1]])
    (step,) = payload([Analysis(recording([Rank()], plan, wire=Wire(bytes_per_ms=MIB / 4)))])["exhibits"][0][
        "steps"
    ]
    stages = {name: took for name, took, _ in step["ranks"][0]["buckets"][1]["stages"]}
    assert (stages["held"], stages["queues"]) == ("0.00 ms", "3.00 ms")


def test_a_bucket_waits_for_ranks_as_long_in_the_lane_as_in_its_history() -> None:
    for rank in payload([Analysis(MADE)])["exhibits"][0]["steps"][0]["ranks"]:
        for bucket in rank["buckets"]:
            (took,) = (took for name, took, _ in bucket["stages"] if name == "waits for ranks")
            drawn_ms = sum(end - begin for begin, end, moves, _ in bucket["stretches"] if not moves)
            assert took == f"{drawn_ms:.2f} ms"


def test_a_page_says_once_whose_wrapper_it_shows() -> None:
    def setting(*titles: str) -> str:
        return payload([Analysis(replace(MADE, title=title)) for title in titles])["setting"]

    assert setting("gpt") == "gpt, minddp, 2 ranks on CPU, gloo"
    assert setting("minddp") == "minddp, 2 ranks on CPU, gloo"
    assert setting("gpt under minddp") == "gpt under minddp, 2 ranks on CPU, gloo"
    assert setting("one", "other") == "2 ranks on CPU, gloo"


def test_several_recordings_come_without_predictions() -> None:
    both = payload([Analysis(MADE), Analysis(MADE)])["exhibits"]
    assert [exhibit["whatIfs"] + exhibit["advice"] for exhibit in both] == [[], []]
    (exhibit,) = payload([Analysis(MADE)])["exhibits"]
    assert exhibit["advice"]
    assert exhibit["whatIfs"]
    assert not set(exhibit["advice"]) & set(exhibit["whatIfs"])


def test_an_interrupted_step_can_be_shown() -> None:
    cut = Analysis(interrupted(MADE))
    (exhibit,) = payload([cut])["exhibits"]
    assert "This step is incomplete" in exhibit["steps"][0]["headline"]
    assert exhibit["steps"][0]["errors"] == [f"Rank {rank} ended with `ValueError: no`." for rank in (0, 1)]
    buckets = exhibit["steps"][0]["ranks"][0]["buckets"]
    assert ["on the wire" in [name for name, *_ in bucket["stages"]] for bucket in buckets] == [False]
    assert render([cut])


def interrupted(made: Recording) -> Recording:
    ranks = []
    for rank in made.ranks:
        events = rank.events[: len(rank.events) // 5]
        ranks.append(replace(rank, events=events, stopped_ns=events[-1].t_ns, error="ValueError: no"))
    return replace(made, ranks=tuple(ranks))
