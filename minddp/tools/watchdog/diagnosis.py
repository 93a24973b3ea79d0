"""Explains why the ranks are stuck, from their states. Pure: states in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from minddp.core.errors import interrupted
from minddp.platform import wording
from minddp.tools.watchdog.rank_state import EXITED, SILENT, RankState

_PHASES = {
    "IDLE": "is between backwards",
    "PREPARED": "is between forward and backward",
    "ACCUMULATING": "is in backward, or an exception has ended it",
    "INCOMPLETE": "has ended a backward that lacks gradients",
    "REDUCING": "has all gradients, and is in backward or before `finalize_backward`",
    "FINALIZING": "is at the end of backward",
    "FINISHED": "is in a backward around one that was reduced",
}
States = Mapping[int, RankState]  # by rank


class Diagnosis(NamedTuple):
    """`is_certain`: the wait can never end, whatever the ranks do next."""

    text: str
    is_certain: bool


def diagnose(states: States) -> Diagnosis:
    """Explain the wait. At least one rank must have answered."""
    furthest = max(state.backward for state in states.values())
    certain = [*_steps_dropped_by_some(states), *_ranks_gone(states, furthest), *_different_collectives(states)]
    found = certain or [*_missing_gradients(states)] or [*_ranks_elsewhere(states, furthest)]
    if not found:
        found = ["All ranks wait: the network between them is stuck, or a machine is overloaded."]
    table = [f"  rank {rank}: {_line(state)}" for rank, state in sorted(states.items())]
    return Diagnosis("\n".join([" ".join([*found, *_waiting_ranks(states)]), *table]), bool(certain))


def _steps_dropped_by_some(states: States) -> Iterator[str]:
    """Ranks that drop a backward in which others have launched more collectives: later ones would not match."""
    furthest = max(state.number for state in states.values())
    for rank, state in states.items():
        if state.drops and state.number < furthest:
            missing = [name for _, names in sorted(state.missing.items()) for name in names]
            ahead = [other for other in states if states[other].number > state.number]
            yield (
                f"{interrupted(state.backward, rank, missing)}. Its script has caught the exception and goes on, "
                f"{state.where}, but {wording.ranks(ahead)} {'has' if len(ahead) == 1 else 'have'} launched "
                f"further collectives of that backward, so later ones would not match. Let an exception in "
                f"backward end the script, or raise it on every rank."
            )


def _ranks_gone(states: States, furthest: int) -> Iterator[str]:
    for rank, state in states.items():
        if state.absence and state.absence != SILENT:
            when = f" after backward {state.backward} of {furthest}" if state.where else ""
            hint = "; its own output says why" if state.absence == EXITED else ""
            yield f"Rank {rank} {state.absence}{when}{hint}."
    if any(state.absence == EXITED and state.where for state in states.values()):
        yield "Give every rank equally many batches, or train within `ddp.join()`."


def _different_collectives(states: States) -> Iterator[str]:
    """The first number under which ranks have launched different collectives."""
    for number in sorted({number for state in states.values() for number in state.recent}):
        launched = {rank: state.recent[number] for rank, state in states.items() if number in state.recent}
        common, *odd = wording.by_value(launched).items()
        if odd:
            launches = [f"{wording.ranks(ranks)} launched {what}" for what, ranks in [*odd, common]]
            yield (
                f"Collective {number} is not the same everywhere: {', '.join(launches)}. "
                f"The ranks differ in model, options or control flow."
            )
            return


def _missing_gradients(states: States) -> Iterator[str]:
    """Ranks whose backward has ended with gradients missing, so the buckets of these were not launched."""
    for rank, state in states.items():
        if state.phase == "INCOMPLETE" and state.missing:
            bucket, names = min(state.missing.items())
            yield (
                f"Rank {rank} has not produced gradients for {wording.names(names)} (bucket {bucket}): backward "
                f"{state.backward} has ended there without them. Use them in the loss on every rank, or pass "
                f"find_unused_parameters=True."
            )


def _ranks_elsewhere(states: States, furthest: int) -> Iterator[str]:
    """Ranks that may still join the collective: they compute, sleep, load data, or are a step behind."""
    for rank, state in states.items():
        if state.waiting_s is None and not state.absence:
            doing = "accumulates under no_sync" if state.accumulates else _PHASES[state.phase]
            behind = f", at backward {state.backward} of {furthest}" if state.backward < furthest else ""
            yield f"Rank {rank} {doing}{behind}, {state.where}."
    if silent := [rank for rank, state in states.items() if state.absence == SILENT]:
        yield f"{wording.subject(silent, 'does', 'do')} not answer: the host may be down or cut off."


def _waiting_ranks(states: States) -> Iterator[str]:
    if waiting := [rank for rank, state in states.items() if state.waiting_s is not None]:
        collectives = {states[rank].last for rank in waiting if states[rank].recent}
        where = f" in {collectives.pop()}" if len(collectives) == 1 else ""
        yield f"{wording.subject(waiting, 'waits', 'wait')}{where}."


def _line(state: RankState) -> str:
    if not state.where:
        return state.absence
    wait = "" if state.waiting_s is None else f", waiting for {state.waiting_s:.0f} s"
    absence = f"{state.absence}; before that: " if state.absence else ""
    return (
        f"{absence}{state.phase.lower()}, backward {state.backward}; {state.last}{wait}; {state.where} "
        f"({state.process})"
    )
