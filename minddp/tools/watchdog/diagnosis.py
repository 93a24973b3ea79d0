"""Explains why the ranks are stuck, from their states. Pure: states in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from minddp.core.errors import interrupted
from minddp.platform import wording
from minddp.tools.watchdog.rank_state import EXITED, LEFT, SILENT, RankState

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


def diagnose(answers: Mapping[int, RankState | str]) -> Diagnosis:
    """Explain the wait. An answer is the state of a rank, or why it has none."""
    states = {rank: it for rank, it in answers.items() if isinstance(it, RankState)}
    absent = {rank: it for rank, it in answers.items() if isinstance(it, str)}
    certain = [*_steps_dropped_by_some(states), *_ranks_gone(absent), *_different_collectives(states)]
    found = certain or [*_missing_gradients(states)] or [*_ranks_elsewhere(states, absent)]
    if not found:
        found = ["All ranks wait: the network between them is stuck, or a machine is overloaded."]
    table = [f"  rank {rank}: {_line(it)}" for rank, it in sorted(answers.items())]
    return Diagnosis("\n".join([" ".join([*found, *_waiting_ranks(states)]), *table]), bool(certain))


def _steps_dropped_by_some(states: States) -> Iterator[str]:
    """Ranks that drop a backward in which others have launched more collectives: later ones would not match."""
    for rank, state in states.items():
        ahead = [other for other in states if states[other].number > state.number]
        if state.drops and ahead:
            yield (
                f"{interrupted(state.backward, rank, state.missing)}. Its script has caught the exception and goes "
                f"on, {state.where}, but {wording.ranks(ahead)} {'has' if len(ahead) == 1 else 'have'} launched "
                f"further collectives of that backward, so later ones would not match. Let an exception in "
                f"backward end the script, or raise it on every rank."
            )


def _ranks_gone(absent: Mapping[int, str]) -> Iterator[str]:
    for rank, absence in absent.items():
        if absence == LEFT:
            yield f"Rank {rank} {LEFT}."
        if absence == EXITED:
            yield (
                f"Rank {rank} {EXITED}; its own output says why. If that was no error, give every rank equally "
                f"many batches, or train within `ddp.join()`."
            )


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
            yield (
                f"Rank {rank} has not produced gradients for {wording.names(state.missing)}: backward "
                f"{state.backward} has ended there without them. Use them in the loss on every rank, or pass "
                f"find_unused_parameters=True."
            )


def _ranks_elsewhere(states: States, absent: Mapping[int, str]) -> Iterator[str]:
    """Ranks that may still join the collective: they compute, sleep, load data, or are a step behind."""
    furthest = max((state.backward for state in states.values()), default=0)
    for rank, state in states.items():
        if state.waiting_s is None:
            doing = "accumulates under no_sync" if state.accumulates else _PHASES[state.phase]
            behind = f", at backward {state.backward} of {furthest}" if state.backward < furthest else ""
            yield f"Rank {rank} {doing}{behind}, {state.where}."
    if silent := [rank for rank, absence in absent.items() if absence == SILENT]:
        yield f"{wording.subject(silent, 'does', 'do')} not answer: the host may be down or cut off."


def _waiting_ranks(states: States) -> Iterator[str]:
    if waiting := [rank for rank, state in states.items() if state.waiting_s is not None]:
        collectives = {states[rank].last for rank in waiting if states[rank].recent}
        where = f" in {collectives.pop()}" if len(collectives) == 1 else ""
        yield f"{wording.subject(waiting, 'waits', 'wait')}{where}."


def _line(state: RankState | str) -> str:
    if isinstance(state, str):
        return state
    wait = "" if state.waiting_s is None else f", waiting for {state.waiting_s:.0f} s"
    return f"{state.phase.lower()}, backward {state.backward}; {state.last}{wait}; {state.where} ({state.process})"
