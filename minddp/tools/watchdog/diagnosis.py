"""Explains why the ranks are stuck, from their states. Pure: states in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from minddp.core.errors import interrupted
from minddp.platform import wording
from minddp.tools.watchdog.rank_state import ENDED, EXITED, LEFT, SILENT, STOPPED, UNWATCHED, RankState, numbered

_PHASES = {
    "IDLE": "is between backwards",
    "PREPARED": "is between forward and backward",
    "ACCUMULATING": "is in backward, or an exception has ended it",
    "INCOMPLETE": "has ended a backward that lacks gradients",
    "REDUCING": "has all gradients, and is in backward or before `finalize_backward`",
    "FINALIZING": "is at the end of backward",
    "FINISHED": "is in a backward around one that was reduced",
}
EQUALLY_MANY = (
    "give every rank equally many batches (`DistributedSampler`, `drop_last=True`), or train within `ddp.join()`"
)
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
    calls = [*_different_calls(states)] if not absent else []
    found = calls or certain or [*_missing_gradients(states)] or [*_ranks_elsewhere(states, absent)]
    if not found:
        found = ["All ranks wait: the network between them is stuck, or a machine is overloaded."]
    table = [f"  rank {rank}: {_line(it)}" for rank, it in sorted(answers.items())]
    return Diagnosis("\n".join([" ".join([*found, *_waiting_ranks(states)]), *table]), bool(certain))


def _steps_dropped_by_some(states: States) -> Iterator[str]:
    """Ranks that drop a backward in which others have launched more collectives: later ones would not match."""
    for rank, state in states.items():
        if state.drops and (ahead := [other for other in states if states[other].number > state.number]):
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
        if absence in (EXITED, ENDED):
            yield f"Rank {rank} {absence}; its own output says why. If that was no error, {EQUALLY_MANY}."


def _different_collectives(states: States) -> Iterator[str]:
    """The first number under which ranks have launched different collectives."""
    for number in sorted({number for state in states.values() for number in state.recent}):
        launched = {rank: state.recent[number] for rank, state in states.items() if number in state.recent}
        common, *odd = wording.by_value(launched).items()
        if odd:
            launches = [f"{wording.ranks(ranks)} launched {what}" for what, ranks in [*odd, common]]
            yield (
                f"Collective {numbered(number)} is not the same everywhere: {', '.join(launches)}. "
                f"The ranks differ in model, options or control flow."
            )
            return


def _different_calls(states: States) -> Iterator[str]:
    """All ranks wait, and not in the same call."""
    calls = {rank: it.waits_in for rank, it in states.items() if it.waits_in and it.waiting_s is not None}
    if len(calls) == len(states) and len(set(calls.values())) > 1:
        waits = [
            f"{wording.subject(ranks, 'waits', 'wait')} in {call} ({states[ranks[0]].where})."
            for call, ranks in wording.by_value(calls).items()
        ]
        yield (
            f"{' '.join(waits)} All ranks of a group have to make the same calls in the same order: make each on "
            f"all ranks or on none. If a rank has no batches left, {EQUALLY_MANY}."
        )


def _missing_gradients(states: States) -> Iterator[str]:
    """Ranks whose backward has ended with gradients missing, so the buckets of these were not launched."""
    waiting = [state for state in states.values() if state.waiting_s is not None]
    unused = {name for state in waiting for name in state.missing}  # there, too
    for rank, state in states.items():
        missing = [name for name in state.missing if name not in unused]
        if state.phase == "INCOMPLETE" and state.waiting_s is None and missing:
            yield (
                f"Rank {rank} has not produced gradients for {wording.names(missing)}: backward "
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
            if behind and state.phase == "IDLE" and not state.accumulates:
                yield f"If it has no batches left, {EQUALLY_MANY}."
    if stopped := [rank for rank, absence in absent.items() if absence == STOPPED]:
        yield (
            f"{wording.subject(stopped, 'is', 'are')} stopped, by a signal (SIGSTOP, Ctrl-Z) or a debugger; "
            f"`kill -CONT` lets a process go on."
        )
    if unwatched := [rank for rank, absence in absent.items() if absence == UNWATCHED]:
        yield f"{wording.subject(unwatched, 'is', 'are')} no longer watched."
    if silent := [rank for rank, absence in absent.items() if absence == SILENT]:
        yield f"{wording.subject(silent, 'does', 'do')} not answer: the host may be down or cut off."


def _waiting_ranks(states: States) -> Iterator[str]:
    if waiting := [rank for rank, state in states.items() if state.waiting_s is not None]:
        collectives = {it.waits_in or it.last for rank in waiting if (it := states[rank]).recent or it.waits_in}
        where = f" in {collectives.pop()}" if len(collectives) == 1 else ""
        yield f"{wording.subject(waiting, 'waits', 'wait')}{where}."


def _line(state: RankState | str) -> str:
    if isinstance(state, str):
        return state
    wait = "" if state.waiting_s is None else f", waiting for {state.waiting_s:.0f} s"
    wait += state.waits_in and f" in {state.waits_in}"
    return f"{state.phase.lower()}, backward {state.backward}; {state.last}{wait}; {state.where} ({state.process})"
