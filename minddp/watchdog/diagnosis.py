"""From the states of the ranks to what has happened, in words. Pure: states in, text out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from minddp.platform import wording
from minddp.watchdog.rank_state import RankState

_PHASES = {
    "IDLE": "is between backwards",
    "ARMED": "is between forward and backward",
    "ACCUMULATING": "is in backward, or an exception has ended it",
    "INCOMPLETE": "has ended a backward that lacks gradients",
    "REDUCING": "has ended a backward that is not finalized yet",
    "FINALIZING": "is at the end of backward",
}
_ABSENCES = {"silent": "does not answer", "exited": "has exited", "left": "has dropped the module"}


@dataclass(frozen=True)
class Absence:
    """Why a rank does not answer: its process has ended, or its module is gone, or for an unknown reason.

    `last` is the state that it left behind, if it ended in order.
    """

    kind: Literal["silent", "exited", "left"]
    last: RankState | None = None


@dataclass(frozen=True)
class Answers:
    """The result of an inquiry: each rank's state, or why there is none."""

    present: dict[int, RankState]
    absent: dict[int, Absence] = field(default_factory=dict)

    @property
    def furthest(self) -> int:
        """The highest number of a backward on any rank."""
        return max(state.progress.backward for state in self.present.values())


@dataclass(frozen=True)
class Diagnosis:
    """`is_certain`: the wait can never end, whatever the ranks do next."""

    text: str
    is_certain: bool


def diagnose(answers: Answers) -> Diagnosis:
    """Why the ranks that answered (at least one) do not go on."""
    fatal = [*_ranks_gone(answers), *_different_collectives(answers)]
    found = fatal or _missing_gradients(answers) or _ranks_elsewhere(answers)
    if not found:
        found = ["All ranks wait in the same collective: the network between them is stuck."]
    lines = {rank: _line(state) for rank, state in answers.present.items()}
    for rank, absence in answers.absent.items():
        before = f"; before that: {_line(absence.last)}" if absence.last else ""
        lines[rank] = f"{_ABSENCES[absence.kind]}{before}"
    table = [f"  rank {rank}: {line}" for rank, line in sorted(lines.items())]
    return Diagnosis("\n".join([" ".join([*found, *_waiting_ranks(answers)]), *table]), bool(fatal))


def _ranks_gone(answers: Answers) -> list[str]:
    found = []
    for rank, absence in answers.absent.items():
        if absence.kind != "silent":
            last = absence.last
            when = f" after backward {last.progress.backward} of {answers.furthest}" if last else ""
            hint = "; its own output says why" if absence.kind == "exited" else ""
            found.append(f"Rank {rank} {_ABSENCES[absence.kind]}{when}{hint}.")
    if any(absence.kind == "exited" and absence.last for absence in answers.absent.values()):
        found.append("Give every rank equally many batches, or train within `ddp.join()`.")
    return found


def _different_collectives(answers: Answers) -> list[str]:
    """The first number under which ranks have launched different collectives."""
    by_number: dict[int, dict[int, str]] = {}
    last_states = {rank: absence.last for rank, absence in answers.absent.items() if absence.last}
    for rank, state in (answers.present | last_states).items():
        for collective in state.recent:
            by_number.setdefault(collective.number, {})[rank] = str(collective)
    for number, launched in sorted(by_number.items()):
        common, *odd = wording.by_value(launched).items()
        if odd:
            launches = [f"{wording.ranks(ranks)} launched {what}" for what, ranks in [*odd, common]]
            return [
                f"Collective {number} is not the same everywhere: {'; '.join(launches[:-1])}, {launches[-1]}. "
                f"The ranks differ in model, options or control flow."
            ]
    return []


def _missing_gradients(answers: Answers) -> list[str]:
    """Ranks whose backward has ended without some gradients, and so without the collectives of their buckets."""
    found = []
    for rank, state in answers.present.items():
        progress = state.progress
        if progress.phase == "INCOMPLETE" and progress.missing:
            bucket, names = min(progress.missing.items())
            found.append(
                f"Rank {rank} has not produced gradients for {wording.names(names)} (bucket {bucket}): backward "
                f"{progress.backward} has ended there without them. Use them in the loss on every rank, or pass "
                f"find_unused_parameters=True."
            )
    return found


def _ranks_elsewhere(answers: Answers) -> list[str]:
    """Ranks that may still come: they compute, sleep, load data, or are a step behind."""
    found = []
    for rank, state in answers.present.items():
        if state.waiting_s is None:
            progress = state.progress
            doing = "accumulates under no_sync" if progress.accumulates else _PHASES[progress.phase]
            if progress.backward < answers.furthest:
                doing += f", at backward {progress.backward} of {answers.furthest}"
            found.append(f"Rank {rank} {doing}, {state.where}.")
    silent = [rank for rank, absence in answers.absent.items() if absence.kind == "silent"]
    if silent:
        found.append(f"{wording.subject(silent, 'does', 'do')} not answer: the host may be down or cut off.")
    return found


def _waiting_ranks(answers: Answers) -> list[str]:
    waiting = [rank for rank, state in answers.present.items() if state.waiting_s is not None]
    if not waiting:
        return []
    [last, *different] = {answers.present[rank].last for rank in waiting}
    where = "" if different or last is None else f" in collective {last.number}, {last}"
    return [f"{wording.subject(waiting, 'waits', 'wait')}{where}."]


def _line(state: RankState) -> str:
    wait = "" if state.waiting_s is None else f", waiting for {state.waiting_s:.0f} s"
    last = f"collective {state.last.number}, {state.last}" if state.last else "no collective yet"
    return (
        f"{state.progress.phase.lower()}, backward {state.progress.backward}; {last}{wait}; "
        f"{state.where} ({state.host}, pid {state.pid})"
    )
