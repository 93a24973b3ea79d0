"""From the states of the ranks to what has happened, in words. Pure: states in, text out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from minddp.platform import wording
from minddp.watchdog.rank_state import EXITED, SILENT, RankState

_PHASES = {
    "IDLE": "is between backwards",
    "ARMED": "is between forward and backward",
    "ACCUMULATING": "is in backward, or an exception has ended it",
    "INCOMPLETE": "has ended a backward that lacks gradients",
    "REDUCING": "has ended a backward that is not finalized yet",
    "FINALIZING": "is at the end of backward",
}
States = Mapping[int, RankState]  # by rank


class Diagnosis(NamedTuple):
    """`is_certain`: the wait can never end, whatever the ranks do next."""

    text: str
    is_certain: bool

    @property
    def picture(self) -> str:
        """The text without what changes from second to second: for how long ranks wait, and lines of scripts."""
        return re.sub(r"waiting for \d+ s|\S+:\d+ in \S+", "", self.text)


def diagnose(states: States) -> Diagnosis:
    """Why the ranks that are present (at least one) do not go on."""
    present = {rank: state for rank, state in states.items() if not state.absence}
    furthest = max(state.backward for state in present.values())
    fatal = [*_steps_dropped_by_some(states), *_ranks_gone(states, furthest), *_different_collectives(states)]
    found = (
        fatal or _missing_gradients(present) or _ranks_elsewhere(states, furthest) or [_all_wait(present, furthest)]
    )
    table = [f"  rank {rank}: {_line(state)}" for rank, state in sorted(states.items())]
    return Diagnosis("\n".join([" ".join([*found, *_waiting_ranks(present)]), *table]), bool(fatal))


def _steps_dropped_by_some(states: States) -> list[str]:
    """Ranks that drop a backward, of which others have launched more: what they launch next would meet that."""
    found = []
    for rank, state in states.items():
        ahead = [other for other in states if states[other].number > state.number]
        if state.drops and ahead:
            missing = [name for _, names in sorted(state.missing.items()) for name in names]
            before = f" before the gradients of {wording.names(missing)} had arrived" if missing else ""
            found.append(
                f"An exception has ended backward {state.backward} on rank {rank}{before}. Its script has "
                f"caught it and goes on, {state.where}, but {wording.ranks(ahead)} "
                f"{'has' if len(ahead) == 1 else 'have'} gone on with the collectives of that backward: those that "
                f"meet from now on do not belong together."
            )
    if found:
        found.append("Let an exception in backward end the script, or see that it comes on every rank.")
    return found


def _ranks_gone(states: States, furthest: int) -> list[str]:
    found = []
    for rank, state in states.items():
        if state.absence and state.absence != SILENT:
            when = f" after backward {state.backward} of {furthest}" if state.where else ""
            hint = "; its own output says why" if state.absence == EXITED else ""
            found.append(f"Rank {rank} {state.absence}{when}{hint}.")
    if any(state.absence == EXITED and state.where for state in states.values()):
        found.append("Give every rank equally many batches, or train within `ddp.join()`.")
    return found


def _different_collectives(states: States) -> list[str]:
    """The first number under which ranks have launched different collectives."""
    for number in sorted({number for state in states.values() for number in state.recent}):
        launched = {rank: state.recent[number] for rank, state in states.items() if number in state.recent}
        common, *odd = wording.by_value(launched).items()
        if odd:
            launches = [f"{wording.ranks(ranks)} launched {what}" for what, ranks in [*odd, common]]
            return [
                f"Collective {number} is not the same everywhere: {'; '.join(launches[:-1])}, {launches[-1]}. "
                f"The ranks differ in model, options or control flow."
            ]
    return []


def _missing_gradients(present: States) -> list[str]:
    """Ranks whose backward has ended without some gradients, and so without the collectives of their buckets."""
    found = []
    for rank, state in present.items():
        if state.phase == "INCOMPLETE" and state.missing:
            bucket, names = min(state.missing.items())
            found.append(
                f"Rank {rank} has not produced gradients for {wording.names(names)} (bucket {bucket}): backward "
                f"{state.backward} has ended there without them. Use them in the loss on every rank, or pass "
                f"find_unused_parameters=True."
            )
    return found


def _ranks_elsewhere(states: States, furthest: int) -> list[str]:
    """Ranks that may still come: they compute, sleep, load data, or are a step behind."""
    found = []
    for rank, state in states.items():
        if state.waiting_s is None and not state.absence:
            doing = "accumulates under no_sync" if state.accumulates else _PHASES[state.phase]
            if state.backward < furthest:
                doing += f", at backward {state.backward} of {furthest}"
            found.append(f"Rank {rank} {doing}, {state.where}.")
    silent = [rank for rank, state in states.items() if state.absence == SILENT]
    if silent:
        found.append(f"{wording.subject(silent, 'does', 'do')} not answer: the host may be down or cut off.")
    return found


def _all_wait(present: States, furthest: int) -> str:
    """No rank is missing. One that is a backward behind waits for what others have received."""
    behind = [rank for rank, state in present.items() if state.backward < furthest]
    if not behind:
        return "All ranks wait in the same collective: the network between them is stuck."
    return (
        f"{wording.subject(behind, 'waits', 'wait')} for a collective that other ranks have completed: its machine "
        f"is overloaded, or the network to it is stuck."
    )


def _waiting_ranks(present: States) -> list[str]:
    waiting = [rank for rank, state in present.items() if state.waiting_s is not None]
    if not waiting:
        return []
    [last, *different] = {present[rank].last for rank in waiting}
    where = "" if different or not present[waiting[0]].recent else f" in {last}"
    return [f"{wording.subject(waiting, 'waits', 'wait')}{where}."]


def _line(state: RankState) -> str:
    wait = "" if state.waiting_s is None else f", waiting for {state.waiting_s:.0f} s"
    place = f"{state.phase.lower()}, backward {state.backward}; {state.last}{wait}; {state.where} ({state.process})"
    return "; before that: ".join(filter(None, [state.absence, place if state.where else ""]))
