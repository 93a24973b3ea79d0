"""The diagnosis for given states, without any rank."""

from __future__ import annotations

from typing import Any

import pytest

from minddp.core.backward_pass import Phase
from minddp.tools.watchdog.diagnosis import Diagnosis, diagnose
from minddp.tools.watchdog.rank_state import ENDED, EXITED, LEFT, SILENT, STOPPED, UNWATCHED, RankState


def state(rank: int, backward: int = 3, phase: str = "FINALIZING", **changed: Any) -> RankState:
    """A rank that waits in its sixth collective, if nothing is `changed`."""
    fields: dict[str, Any] = {
        "process": f"here, pid {100 + rank}",
        "recent": collectives(5, 6),
        "waiting_s": 30.0,
        "where": "train.py:57 in step",
    }
    return RankState(phase, backward, **{**fields, **changed})


def collectives(*numbers: int, numel: int = 1048576) -> dict[int, str]:
    return dict.fromkeys(numbers, f"all-reduce of {numel:,} float32")


def elsewhere(rank: int, **changed: Any) -> RankState:
    """A rank that is not in a collective and has begun one fewer."""
    fields = {"phase": "IDLE", "backward": 2, "waiting_s": None, "recent": collectives(5)}
    return state(rank, **{**fields, **changed})


def lacking(*missing: str) -> RankState:
    return elsewhere(1, backward=3, phase="INCOMPLETE", missing=missing)


def diagnosis_of(*states: RankState | str) -> Diagnosis:
    """Of the ranks in their order; a text is why one is absent."""
    return diagnose(dict(enumerate(states)))


LAYERS = [f"decoder.{layer}.{part}" for layer in range(9) for part in ("weight", "bias")]
SAVES = {"waits_in": "`barrier`", "where": "train.py:98 in save"}
IN_GROUPS = [
    state(rank, recent={("0 (gloo)", 6): launched, ("1 (gloo)", 9): "barrier"})
    for rank, launched in enumerate(("barrier", "all_reduce of 3 float"))
]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (
            [state(0), EXITED, state(2)],
            ["Rank 1 has exited; its own output says why. ", "equally many batches", " Ranks 0 and 2 wait in coll"],
        ),
        ([state(0), LEFT], ["Rank 1 has dropped the module."]),
        (
            [state(0), ENDED],  # it may have had fewer batches
            ["Rank 1 has left the process group", "`drop_last=True`), or train within `ddp.join()`"],
        ),
        (
            [state(0), state(1), state(2), state(3, recent=collectives(5) | collectives(6, numel=1048580))],
            [
                "Collective 6 is not the same everywhere: rank 3 launched all-reduce of 1,048,580 float32, ranks "
                "0-2 launched all-reduce of 1,048,576 float32."
            ],
        ),
        (
            [state(0), state(1, recent=collectives(5, numel=7) | collectives(6, numel=8)), state(2)],
            ["Collective 5 is not the same everywhere"],
        ),
        (
            IN_GROUPS,
            ["Collective 6 of group 0 (gloo) is not the same everywhere: rank 1 launched all_reduce"],
        ),
    ],
)
def test_a_wait_that_can_never_end(states: list[RankState | str], words: list[str]) -> None:
    found = diagnosis_of(*states)
    assert found.is_certain
    assert found.text.startswith(words[0])
    assert all(word in found.text for word in words), found.text


@pytest.mark.parametrize(
    ("rank_1", "words"),
    [
        (elsewhere(1), ["Rank 1 is between backwards, at backward 2 of 3, train.py:57 in step."]),
        (elsewhere(1, backward=3, phase="PREPARED"), ["Rank 1 is between forward and backward, train.py"]),
        (elsewhere(1, accumulates=True), ["Rank 1 accumulates under no_sync, at backward 2 of 3"]),
        (elsewhere(1, phase="ACCUMULATING"), ["Rank 1 is in backward, or an exception has ended it"]),
        (
            lacking("decoder.weight", "decoder.bias"),  # a second backward may bring them
            [
                "Rank 1 has not produced gradients for `decoder.weight`, `decoder.bias`: backward 3",
                "find_unused_parameters=True",
            ],
        ),
        (lacking(*LAYERS), ["`decoder.0.*`, `decoder.1.*`", "and 3 more: backward"]),
        (STOPPED, ["Rank 1 is stopped, by a signal (SIGSTOP, Ctrl-Z) or a debugger; `kill -CONT`"]),
        (SILENT, ["Rank 1 does not answer: the host may be down"]),
        (UNWATCHED, ["Rank 1 is no longer watched. Ranks 0 and 2 wait"]),
        *((elsewhere(1, phase=phase.name), ["Rank 1 "]) for phase in Phase),
    ],
)
def test_a_rank_that_may_still_come_is_only_reported(rank_1: RankState | str, words: list[str]) -> None:
    found = diagnosis_of(state(0), rank_1, state(2))
    assert not found.is_certain
    assert all(word in found.text for word in [*words, "Ranks 0 and 2 wait in collective 6"]), found.text
    assert ("host may be down" in found.text) == (rank_1 == SILENT)


def test_ranks_that_have_forgotten_a_collective_are_not_compared_in_it() -> None:
    assert "not the same" not in diagnosis_of(state(0), elsewhere(1, recent=collectives(4, numel=7))).text


def test_all_ranks_in_the_same_collective() -> None:
    found = diagnosis_of(state(0), state(1))
    assert not found.is_certain
    assert "the network between them" in found.text


def test_every_rank_has_its_line() -> None:
    lines = diagnosis_of(state(0), EXITED, SILENT, LEFT).text.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "waiting for 30 s; train.py:57 in step (here, pid 100)" in lines[0]
    assert "collective 9 of group 1 (gloo), barrier, waiting" in diagnosis_of(*IN_GROUPS).text.splitlines()[1]


def test_ranks_that_wait_in_different_calls() -> None:
    found = diagnosis_of(state(0, **SAVES), state(1, waits_in="backward, at its end"))
    assert not found.is_certain, "both may be under way, in groups of their own"
    assert found.text.startswith(
        "Rank 0 waits in `barrier` (train.py:98 in save). Rank 1 waits in backward, at its end (train.py:57 in "
        "step). All ranks of a group"
    )
    assert "make each on all ranks or on none" in found.text
    assert "`drop_last=True`" in found.text


def test_parameters_that_the_waiting_ranks_lack_too_are_not_the_cause() -> None:
    waits = state(0, missing=("frozen",))
    assert "gradients for `head.weight`: backward" in diagnosis_of(waits, lacking("frozen", "head.weight")).text
    assert "has not produced" not in diagnosis_of(waits, lacking("frozen")).text
