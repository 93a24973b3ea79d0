"""The grader tells wrong classes from right ones, and from each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs.learning.quotes import FOLDER
from reference import checks, comparison
from reference import grade as grader
from reference.checks import FURTHER, REQUIRED
from reference.grade import TRAPS, grade
from tests.docs.links import anchors
from tests.reference import wrong

FILE = wrong.__file__
LIMIT_S = 30.0

#: The check that fails first, and the trap.
WRONG = {
    "StartsUnequal": ("replicas start equal", "start"),
    "StartsWithOwnBuffers": ("replicas start equal", "start buffers"),
    "ChangesTheOutput": ("replicas start equal", "forward"),
    "SendsNothing": ("gradients are averaged", "silent"),
    "AveragesACopy": ("gradients are averaged", "local"),
    "AveragesTheParameter": ("gradients are averaged", "parameter"),
    "ForgetsTheLast": ("gradients are averaged", "forgotten"),
    "Sums": ("gradients are averaged", "summed"),
    "DividesTwice": ("gradients are averaged", "divided twice"),
    "BroadcastsTheGradient": ("gradients are averaged", "rank 0's"),
    "Rounds": ("gradients are averaged", "rounded"),
    "ClearsGradients": ("gradients are averaged", "none"),
    "DoesNotWait": ("it waits for the averages", "unwaited"),
    "RightOnce": ("later steps, too", "later"),
    "AveragesTheIncoming": ("gradients accumulate", "incoming"),
    "ForgetsTheFirstMicroBatch": ("gradients accumulate", "last only"),
    "ForgetsAllButTwoMicroBatches": ("gradients accumulate", "first lost"),
    "SumsEveryMicroBatch": ("gradients accumulate", "every sum"),
    "DividesTiedTwice": ("tied weights", "tied"),
    "TouchesFrozen": ("frozen parameters", "frozen"),
    "LeavesOutTheRemainder": ("tied weights", "forgotten"),
    "LaunchesWhenReady": ("launch in plan order", "readiness"),
    "MisplacesTheSecondDtype": ("two dtypes", "other"),
    "UnpacksTheFirstBucket": ("several buckets", "forgotten"),
    "LaunchesBucketsWhenReady": ("large layers in plan order", "readiness"),
    "RaisesWhenWrapped": ("replicas start equal", "raised"),
    "Dies": ("it waits for the averages", "died"),
    "Hangs": ("it waits for the averages", "hung"),
}
#: Each is wrong as one above is, in a way that is harder to tell.
ALIKE = {
    "StartsUnequalAndSendsBuffers": WRONG["StartsUnequal"],
    "RightOnceOnRank1": WRONG["RightOnce"],
    "WaitsForAllButOne": WRONG["DoesNotWait"],
    "LaunchesUnlikeBucketsWhenReady": WRONG["LaunchesWhenReady"],
}
FAST = ["AveragesTheParameter", "AveragesTheIncoming", "LaunchesWhenReady", "Hangs"]


def first_fault(name: str) -> tuple[str, str]:
    limit_s = 6.0 if name == "Hangs" else LIMIT_S
    verdicts = grade(f"{FILE}:{name}", world_sizes=[2], limit_s=limit_s)
    verdict = next(v for v in verdicts if v.fault and v.check in REQUIRED)
    verdicts.close()
    return verdict.check, verdict.fault.trap


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in WRONG | ALIKE]
)
def test_what_is_wrong_first_is_recognised(name):
    assert first_fault(name) == (WRONG | ALIKE)[name]


@pytest.mark.slow
def test_nothing_is_said_of_the_bits_of_a_wrong_gradient():
    checks_made = [verdict.check for verdict in grade(f"{FILE}:SendsNothing", world_sizes=[2], limit_s=LIMIT_S)]
    assert "the bits of torch's DDP" not in checks_made


@pytest.mark.slow
def test_a_fault_found_on_a_rank_is_told_though_others_hang():
    *_, verdict = grade(f"{FILE}:Hangs", world_sizes=[2], limit_s=6.0)
    assert (verdict.check, verdict.fault.trap) == ("gradients are averaged", "forgotten")


def test_every_wrong_class_is_told_apart():
    assert len(WRONG) >= 15
    assert len(set(WRONG.values())) == len(WRONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "lacks"),
    [
        ("naive:Naive", {"messages", "overlap", "buffers", "raised"}),
        ("flat:Flat", {"overlap", "buffers", "raised"}),
        ("overlapped:Overlapped", {"messages", "buffers", "raised", "readiness"}),
        ("bucketed:Bucketed", {"buffers", "raised"}),
        ("automatic:Automatic", {"buffers", "raised"}),
    ],
)
def test_a_rung_has_right_gradients_and_lacks_what_it_lacks(rung, lacks):
    verdicts = {v.check: v for v in grade(f"reference.{rung}", world_sizes=[2], limit_s=LIMIT_S)}
    left_out = {"the bits of torch's DDP"} if "readiness" in lacks else set()
    assert verdicts.keys() == {*REQUIRED, *FURTHER} - left_out
    assert {v.fault.trap for v in verdicts.values() if v.fault} == lacks
    assert "No gradient for `layers.c.weight`" in verdicts["unused parameters"].fault.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("SendsStaleWhereUnused", {"unused", "messages", "overlap", "buffers"}),
        ("SendsUnderTheSecondNoSync", {"raised", "messages", "overlap", "no_sync", "buffers"}),
    ],
)
def test_right_gradients_that_still_lack_something(name, lacks):
    verdicts = [*grade(f"{FILE}:{name}", world_sizes=[2], limit_s=LIMIT_S)]
    assert {v.fault.trap for v in verdicts if v.fault} == lacks


@pytest.mark.parametrize("place", sorted({place for _, place in TRAPS.values()}))
def test_every_trap_has_a_chapter_that_exists(place):
    page, _, chapter = place.partition(" ")
    text = (FOLDER / f"{page}.md").read_text()
    assert chapter in {"", *(heading.partition("-")[0] for heading in anchors(text))}


def test_a_class_names_only_traps_that_are_explained():
    traps = {
        node.args[0].value
        for file in (checks.__file__, comparison.__file__)
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "Fault"
        and isinstance(node.args[0], ast.Constant)
    }
    assert traps
    assert traps | {trap for _, trap in WRONG.values()} <= TRAPS.keys()


def verdicts_of(*faults: tuple[str, grader.Fault | None]) -> list[grader.Verdict]:
    return [grader.Verdict(check, 2, fault) for check, fault in faults]


@pytest.mark.parametrize(
    ("faults", "says", "ends_with"),
    [
        ([("overlap with backward", None)], "Still missing: no message per parameter, no_sync", None),
        ([("overlap with backward", grader.Fault("overlap", "Late."))], "Late.\nNothing is hidden", None),
        (
            [
                ("tied weights", grader.Fault("tied", "`w`: 2, not 1.")),
                ("frozen parameters", grader.Fault("frozen", "x")),
            ],
            "`w`: 2, not 1.\nA weight under two names is one parameter",
            "Not right yet: tied weights.",
        ),
    ],
)
def test_the_command_explains_the_first_fault_and_its_exit_status_is_of_the_gradients(
    monkeypatch, capsys, faults, says, ends_with
):
    monkeypatch.setattr(grader, "grade", lambda spec, limit_s: iter(verdicts_of(*faults)))
    if ends_with is None:
        grader.main("mine.py:Mine")
    else:
        with pytest.raises(SystemExit, match=ends_with):
            grader.main("mine.py:Mine")
    out = capsys.readouterr().out
    assert says in out
    assert "\nx" not in out  # only the first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "AveragesTheIncoming",
            "Measured, it is {own} x rank 0's micro-batch 1 + {own} x rank 0's micro-batch 2 + 0.5",
        ),
        pytest.param("Sums", "it is 1 x rank 0's gradient + 1 x rank 1's gradient.", marks=pytest.mark.slow),
        pytest.param("DividesTwice", "it is 0.25 x rank 0's gradient + 0.25 x rank 1's", marks=pytest.mark.slow),
    ],
)
def test_a_fault_says_what_was_computed_instead_of_the_mean(name: str, text: str) -> None:
    verdicts = grade(f"{FILE}:{name}", world_sizes=[2], limit_s=LIMIT_S)
    fault = next(verdict.fault for verdict in verdicts if verdict.fault and verdict.check in REQUIRED)
    verdicts.close()
    assert text.format(own=int("rank 0 of 2" in fault.text)) in fault.text
