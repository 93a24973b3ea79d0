"""The phases and what one backward remembers."""

from __future__ import annotations

import pytest

from minddp.core.backward_pass import ALLOWED, WITH_GUARD, WITH_PASS, BackwardPass, Phase
from minddp.core.packing import Scaling
from minddp.core.reducer import Reducer


class Bare:
    """A reducer's phase without the reducer."""

    def __init__(self, phase: Phase):
        self.phase = phase

    def _enter(self, phase: Phase) -> None:
        self.phase = phase


@pytest.mark.parametrize("start", Phase)
@pytest.mark.parametrize("end", Phase)
def test_a_transition_that_is_not_allowed_is_an_error(start: Phase, end: Phase) -> None:
    reducer = Bare(start)
    if end in ALLOWED[start]:
        Reducer._move_to(reducer, end)
        assert reducer.phase is end
    else:
        with pytest.raises(RuntimeError, match=f"phase {start.name} cannot become {end.name}"):
            Reducer._move_to(reducer, end)
        assert reducer.phase is start


def test_every_phase_is_reached_from_idle_and_leads_back() -> None:
    def reached_from(phase: Phase) -> set[Phase]:
        seen, ahead = set(), [phase]
        while ahead:
            for following in ALLOWED[ahead.pop()] - seen:
                seen.add(following)
                ahead.append(following)
        return seen

    assert all(reached_from(phase) == set(Phase) for phase in Phase)


def test_a_guard_stands_only_where_there_is_a_pass() -> None:
    assert WITH_GUARD < WITH_PASS
    assert WITH_PASS == set(Phase) - {Phase.IDLE, Phase.ARMED}


class Ready:
    """A readiness of which only the order matters."""

    def __init__(self, *order: int):
        self.ready_order = list(order)


def backward_pass(groups_left: list[int], **fields: list[int]) -> BackwardPass:
    return BackwardPass(Ready(2, 0, 1, 3), groups_left, Scaling(), **fields)


def test_only_the_bucket_at_the_head_of_the_plan_may_leave() -> None:
    current = backward_pass([1, 0, 0])
    assert not current.next_is_ready
    current.groups_left[0] = 0
    for launched in range(3):
        assert (current.next_is_ready, current.all_launched) == (True, False), launched
        current.reductions.append(None)
    assert (current.next_is_ready, current.all_launched) == (False, True)


def test_unused_parameters_come_last_in_the_observed_order() -> None:
    assert backward_pass([1], unused=[0, 3]).ready_order() == [2, 1, 0, 3]
    assert backward_pass([1]).ready_order() == [2, 0, 1, 3]
