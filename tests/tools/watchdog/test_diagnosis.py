"""The diagnosis for given states, without any rank."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from minddp.core.backward_pass import Phase
from minddp.tools.watchdog.diagnosis import diagnose
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


def diagnosis_of(*states: RankState | str) -> Any:
    """Of the ranks in their order; a text is why one is absent."""
    return diagnose(dict(enumerate(states)))


def test_a_rank_that_exited_is_named_and_the_wait_is_over() -> None:
    found = diagnosis_of(state(0), EXITED, state(2))
    assert found.is_certain
    assert found.text.startswith("Rank 1 has exited; its own output says why. ")
    assert "give every rank equally many batches" in found.text
    assert " Ranks 0 and 2 wait in collective 6," in found.text


def test_a_rank_that_dropped_its_module_will_not_come() -> None:
    found = diagnosis_of(state(0), LEFT)
    assert found.is_certain
    assert "Rank 1 has dropped the module." in found.text


def test_different_collectives_of_one_number_are_certain_and_named() -> None:
    odd = state(3, recent=collectives(5) | collectives(6, numel=1048580))
    found = diagnosis_of(state(0), state(1), state(2), odd)
    assert found.is_certain
    assert (
        "Collective 6 is not the same everywhere: rank 3 launched all-reduce of 1,048,580 float32, ranks 0-2 "
        "launched all-reduce of 1,048,576 float32." in found.text
    )


def test_the_first_difference_counts() -> None:
    odd = state(1, recent=collectives(5, numel=7) | collectives(6, numel=8))
    assert "Collective 5 is not the same everywhere" in diagnosis_of(state(0), odd, state(2)).text


def test_ranks_that_have_forgotten_a_collective_are_not_compared_in_it() -> None:
    assert "not the same" not in diagnosis_of(state(0), elsewhere(1, recent=collectives(4, numel=7))).text


def test_missing_gradients_are_named() -> None:
    names = ("decoder.weight", "decoder.bias")
    lacking = elsewhere(2, backward=3, phase="INCOMPLETE", missing=names)
    found = diagnosis_of(state(0), state(1), lacking)
    assert not found.is_certain, "a second backward may bring them"
    assert "Rank 2 has not produced gradients for `decoder.weight`, `decoder.bias`: backward 3" in found.text
    assert "find_unused_parameters=True" in found.text
    assert "Ranks 0 and 1 wait in collective 6" in found.text


def test_many_missing_gradients_are_named_by_layer() -> None:
    names = tuple(f"decoder.{layer}.{part}" for layer in range(9) for part in ("weight", "bias"))
    lacking = elsewhere(1, phase="INCOMPLETE", missing=names)
    assert "`decoder.0.*`, `decoder.1.*`" in diagnosis_of(state(0), lacking).text
    assert "and 3 more: backward" in diagnosis_of(state(0), lacking).text


@pytest.mark.parametrize(
    ("rank_1", "words"),
    [
        (elsewhere(1), "Rank 1 is between backwards, at backward 2 of 3, train.py:57 in step."),
        (elsewhere(1, backward=3, phase="PREPARED"), "Rank 1 is between forward and backward, train.py"),
        (elsewhere(1, accumulates=True), "Rank 1 accumulates under no_sync, at backward 2 of 3"),
        (elsewhere(1, phase="ACCUMULATING"), "Rank 1 is in backward, or an exception has ended it"),
    ],
)
def test_a_rank_that_may_still_come_is_only_reported(rank_1: RankState, words: str) -> None:
    found = diagnosis_of(state(0), rank_1, state(2))
    assert not found.is_certain
    assert words in found.text
    assert "Ranks 0 and 2 wait in collective 6" in found.text


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_of_the_reducer_has_words(phase: Phase) -> None:
    assert "Rank 1 " in diagnosis_of(state(0), elsewhere(1, phase=phase.name)).text


def test_a_rank_that_does_not_answer_is_reported_but_not_certain() -> None:
    found = diagnosis_of(state(0), SILENT, state(2), SILENT)
    assert not found.is_certain
    assert "Ranks 1 and 3 do not answer" in found.text


def test_all_ranks_in_the_same_collective() -> None:
    found = diagnosis_of(state(0), state(1))
    assert not found.is_certain
    assert "the network between them" in found.text


def test_every_rank_has_its_line() -> None:
    found = diagnosis_of(state(0), EXITED, SILENT, LEFT)
    lines = found.text.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "waiting for 30 s; train.py:57 in step (here, pid 100)" in lines[0]


def test_a_state_survives_the_store() -> None:
    sent = state(1, missing=("a", "b"), accumulates=True)
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_ranks_that_wait_in_different_calls() -> None:
    waits = {"waits_in": "`barrier`", "where": "train.py:98 in save"}
    found = diagnosis_of(state(0, **waits), state(1, waits_in="backward, at its end"))
    assert not found.is_certain, "both may be under way, in groups of their own"
    assert found.text.startswith(
        "Rank 0 waits in `barrier` (train.py:98 in save). Rank 1 waits in backward, at its "
    )
    assert "end (train.py:57 in step). All ranks of a group" in found.text
    assert "make each on all ranks or on none" in found.text
    assert "`drop_last=True`" in found.text


def test_collectives_of_a_group_are_compared_by_their_number_in_it() -> None:
    launched = [
        {("0 (gloo)", 6): what, ("1 (gloo)", 9): "barrier"} for what in ("barrier", "all_reduce of 3 float")
    ]
    found = diagnosis_of(*(state(rank, recent=recent) for rank, recent in enumerate(launched)))
    assert found.is_certain
    assert "Collective 6 of group 0 (gloo) is not the same everywhere: rank 1 launched all_reduce" in found.text
    assert "collective 9 of group 1 (gloo), barrier, waiting" in found.text.splitlines()[1]


def test_a_rank_that_is_stopped_is_not_called_out_of_reach() -> None:
    found = diagnosis_of(state(0), STOPPED)
    assert not found.is_certain
    assert "Rank 1 is stopped, by a signal (SIGSTOP, Ctrl-Z) or a debugger; `kill -CONT`" in found.text
    assert "host may be down" not in found.text


def test_a_rank_whose_watch_was_closed_may_still_come() -> None:
    found = diagnosis_of(state(0), UNWATCHED)
    assert not found.is_certain
    assert "Rank 1 is no longer watched. Rank 0 waits" in found.text


def test_a_rank_that_has_left_the_group_may_have_had_fewer_batches() -> None:
    found = diagnosis_of(state(0), ENDED)
    assert found.is_certain
    assert "Rank 1 has left the process group" in found.text
    assert "`DistributedSampler`, `drop_last=True`), or train within `ddp.join()`" in found.text


def test_parameters_that_the_waiting_ranks_lack_too_are_not_the_cause() -> None:
    common = ("frozen",)
    lacking = elsewhere(1, phase="INCOMPLETE", missing=(*common, "head.weight"))
    assert "gradients for `head.weight`: backward" in diagnosis_of(state(0, missing=common), lacking).text
    same = elsewhere(1, phase="INCOMPLETE", missing=common)
    assert "has not produced" not in diagnosis_of(state(0, missing=common), same).text
