"""Scripts that are always played: where minddp once differed from torch, and where torch raises or is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.script import Line, Options, Script
from tests.parity.search import Search
from tests.ranks import RankPool

FINDING, STATIC = Options(find_unused_parameters=True), Options(static_graph=True)
TRAIN, FAIL = Line("train"), Line("fail", ("backward", 1))

#: Scripts in which minddp once differed, shrunk. They must not differ again.
FAULTS = {
    "a backward on one weight is taken for the one that forward expects, and that of the loss stays local": Script(
        ("large",), FINDING, (Line("backward_outside", (0, "between")),)
    ),
    "a backward that failed is taken up by one of another wrapper that shares a layer": Script(
        ("large:last", "transposed"), lines=(Line("fail", ("backward", 2)), Line("share", (0,)))
    ),
    "gradients come back that were cleared after an error for missing ones": Script(
        ("large:last",),
        lines=(Line("drop", (0,)), TRAIN, Line("backward_outside", (0, "before"))),
        goes_on=True,
    ),
    "a gradient that no rank used this time was averaged all the same": Script(
        ("branch by turn",), FINDING, (TRAIN, TRAIN), world_size=3
    ),
    "what an interrupted pass had used counted as used in the next": Script(
        ("branch by turn", "large"), FINDING, (Line("reorder", (0,)), Line("fail", ("backward", 2)), TRAIN)
    ),
    "a second backward counted as use in the next pass, although its gradient was gone": Script(
        ("branch by turn",), FINDING, (Line("again"), FAIL, TRAIN)
    ),
    "a static graph took an interrupted first pass for its record": Script(
        ("large",), STATIC, (FAIL, TRAIN, TRAIN)
    ),
    "a static graph refused a first backward under no_sync, which follows a forward without one": Script(
        ("norm",), STATIC, (Line("evaluate", ("eval", "before")), Line("backward_in_no_sync"), TRAIN, TRAIN)
    ),
    "a bucket that no rank uses was skipped in a static graph's first backward, too": Script(
        ("large", "unused:float64"),
        Options(static_graph=True, skip_all_reduce_unused_params=True),
        (Line("comm_hook", ("take_notes",)), TRAIN, TRAIN),
    ),
    "a hook saw gradients in the strides of their parameters": Script(
        ("transposed",), lines=(Line("comm_hook", ("take_notes",)), TRAIN)
    ),
    "PowerSGD compressed a transposed matrix": Script(
        ("transposed",), lines=(Line("comm_hook", ("power_sgd",)), TRAIN, TRAIN, TRAIN)
    ),
    **{  # a wrapper that waits for the last gradient of calm steps alone would go on without the mean
        f"a gradient that comes again after all others: {how}": Script(
            ("large", "small"), lines=(Line("reuse", (1, how)), TRAIN), seed=26, calm_steps=4
        )
        for how in ("reentrant and plain around another", "plain and reentrant around another")
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_was_found_is_mended(fault: str, pools: Callable[[int], RankPool]) -> None:
    assert Search(pools).play(FAULTS[fault]) is None


def steps_of(line: Line, options: Options, *layers: str) -> Script:
    """That line in each step, from the first on. After an error, or where torch is wrong, the script goes on."""
    return Script(layers or ("small", "large"), options, (line,) * 4, goes_on=True)


@pytest.mark.parametrize("options", [Options(), STATIC, FINDING], ids=repr)
@pytest.mark.parametrize(
    "line",
    [Line("change_output", ("view", "mul_")), Line("inside_checkpoint", ("reentrant", 0, "plain"))],
    ids=repr,
)
def test_odd_outputs_and_checkpoints_have_torchs_bits(
    line: Line, options: Options, pools: Callable[[int], RankPool]
) -> None:
    search = Search(pools)
    assert search.play(steps_of(line, options)) is None
    assert search.last_notes == []


@pytest.mark.parametrize("options", [Options(), STATIC], ids=repr)
def test_a_checkpoint_of_the_wrapper_may_contain_a_checkpoint(
    options: Options, pools: Callable[[int], RankPool]
) -> None:
    """The recorded backward ended with the inner checkpoint's: "your training graph has changed"."""
    search = Search(pools)
    assert search.play(steps_of(Line("inside_checkpoint", ("reentrant", 1, "reentrant")), options)) is None
    assert search.last_notes == []


WRONG = "torch is silently wrong: minddp "


@pytest.mark.parametrize(
    ("line", "options", "note"),
    [
        (Line("hessian", ("before",)), STATIC, WRONG + "has the mean"),
        (Line("penalise"), STATIC, WRONG + "has the mean"),
        (Line("change_output", ("object", "mul_")), STATIC, WRONG + "has the mean"),
        (Line("change_output", ("with detached", "second")), STATIC, WRONG + "has the mean"),
        (Line("change_output", ("with detached", "second")), FINDING, WRONG + "has the mean"),
        (Line("heads", ("two heads", "in order")), STATIC, WRONG + "raises"),
        (Line("heads", ("two heads", "in order")), FINDING, WRONG + "has the mean"),
        (Line("heads", ("two heads", "reversed")), FINDING, WRONG + "has the mean"),
    ],
    ids=repr,
)
def test_gradients_are_the_mean_of_the_unwrapped_models_where_torchs_are_not(
    line: Line, options: Options, note: str, pools: Callable[[int], RankPool]
) -> None:
    """See docs/differences.md: torch takes `autograd.grad` for the backward, or returns copies of the outputs."""
    search = Search(pools)
    assert search.play(steps_of(line, options)) is None
    assert search.last_notes
    assert all(note in each for each in search.last_notes), search.last_notes


@pytest.mark.parametrize("output", ["tensor", "two heads"])
def test_a_second_backward_through_the_same_outputs_stays_local_as_in_torch(
    output: str, pools: Callable[[int], RankPool]
) -> None:
    lines = (Line("output_as", (output,)), *(Line("again"),) * 4)
    assert Search(pools).play(Script(("large", "small"), FINDING, lines, world_size=3)) is None
