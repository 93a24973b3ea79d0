"""From what the ranks say of themselves to what has happened, in words. Pure: states in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minddp.watchdog.rank_state import Collective, RankState

_MANY = 6  # parameters that are named one by one

_DOING = {
    "IDLE": "is between backwards",
    "ARMED": "is between forward and backward",
    "ACCUMULATING": "is in backward, or an exception has ended it",
    "INCOMPLETE": "has ended a backward that lacks gradients",
    "FINALIZING": "is at the end of backward",
}


@dataclass(frozen=True)
class Answers:
    """What became of the question to each rank: an answer, none, or certainty that no answer can come.

    A rank that has `exited` or `left` (its module is gone) may have said at the end where it was then.
    """

    present: Mapping[int, RankState]
    silent: Sequence[int] = ()
    exited: Sequence[int] = ()
    left: Sequence[int] = ()
    last_words: Mapping[int, RankState] = field(default_factory=dict)

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, state in self.present.items() if state.waiting_s is not None]

    @property
    def furthest(self) -> int:
        """The highest number of a backward that any rank is in."""
        return max(state.progress.backward for state in self.present.values())


@dataclass(frozen=True)
class Diagnosis:
    """`is_certain` tells that waiting on is of no use: nothing that a rank may still do would end it."""

    text: str
    is_certain: bool


def diagnose(answers: Answers) -> Diagnosis:
    """What keeps the ranks that answered (one at least) from going on."""
    fatal = [*_gone(answers), *_different_collectives(answers)]
    found = fatal or _missing_gradients(answers) or _elsewhere(answers)
    if not found:
        found = ["All ranks wait in the same collective: the network between them is stuck."]
    table = [f"  rank {rank}: {line}" for rank, line in sorted(_lines(answers).items())]
    return Diagnosis("\n".join([" ".join([*found, *_waits(answers)]), *table]), bool(fatal))


def _gone(answers: Answers) -> list[str]:
    found = []
    for ranks, what, hint in (
        (answers.exited, "exited", "Its own output says why."),
        (answers.left, "dropped the module", ""),
    ):
        for rank in ranks:
            last = answers.last_words.get(rank)
            when = f" after backward {last.progress.backward} of {answers.furthest}" if last else ""
            found.append(f"Rank {rank} has {what}{when}.")
        if ranks and hint:
            found.append(hint)
    if any(rank in answers.last_words for rank in answers.exited):
        found.append("Give every rank equally many batches, or train within `ddp.join()`.")
    return found


def _different_collectives(answers: Answers) -> list[str]:
    """The first collective that ranks have begun under one number, but not the same one."""
    by_number: dict[int, dict[str, list[int]]] = {}
    for rank, state in [*answers.present.items(), *answers.last_words.items()]:
        for collective in state.recent:
            by_number.setdefault(collective.number, {}).setdefault(str(collective), []).append(rank)
    for number, kinds in sorted(by_number.items()):
        if len(kinds) > 1:
            (common, others), *odd = sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[1]))
            tales = "; ".join(f"{_ranks(sorted(ranks))} launched {what}" for what, ranks in odd)
            return [
                f"Collective {number} is not the same everywhere: {tales}, {_ranks(sorted(others))} launched "
                f"{common}. The ranks differ in model, options or control flow."
            ]
    return []


def _missing_gradients(answers: Answers) -> list[str]:
    """A rank whose backward has ended without some gradients does not launch what the others wait for."""
    found = []
    for rank, state in answers.present.items():
        progress = state.progress
        if progress.phase == "INCOMPLETE" and progress.missing:
            bucket, names = min(progress.missing.items())
            found.append(
                f"Rank {rank} has not produced gradients for {_listed(names)} (bucket {bucket}): backward "
                f"{progress.backward} has ended there without them. Use them in the loss on every rank, or pass "
                f"find_unused_parameters=True."
            )
    return found


def _elsewhere(answers: Answers) -> list[str]:
    """Ranks that could still come: they compute, sleep, load data, or are a step behind."""
    tales = [
        f"Rank {rank} {_whereabouts(state, answers)}."
        for rank, state in answers.present.items()
        if state.waiting_s is None
    ]
    if answers.silent:
        verb = "does" if len(answers.silent) == 1 else "do"
        tales.append(f"{_ranks(answers.silent).capitalize()} {verb} not answer: the host may be down or cut off.")
    return tales


def _whereabouts(state: RankState, answers: Answers) -> str:
    progress = state.progress
    doing = "accumulates under no_sync" if progress.accumulates else _DOING[progress.phase]
    if progress.backward < answers.furthest:
        doing += f", at backward {progress.backward} of {answers.furthest}"
    return f"{doing}, {state.where}"


def _waits(answers: Answers) -> list[str]:
    waiting = answers.waiting
    if not waiting:
        return []
    last = {_name(answers.present[rank].last) for rank in waiting}
    where = f" in {last.pop()}" if len(last) == 1 else ""
    return [f"{_ranks(waiting).capitalize()} {'waits' if len(waiting) == 1 else 'wait'}{where}."]


def _lines(answers: Answers) -> dict[int, str]:
    lines = {rank: _line(state) for rank, state in answers.present.items()}
    for ranks, what in (
        (answers.silent, "does not answer"),
        (answers.exited, "has exited"),
        (answers.left, "has dropped the module"),
    ):
        for rank in ranks:
            last = answers.last_words.get(rank)
            lines[rank] = what + (f"; before that: {_line(last)}" if last else "")
    return lines


def _line(state: RankState) -> str:
    wait = "" if state.waiting_s is None else f", waiting for {state.waiting_s:.0f} s"
    last = f"collective {state.last.number}, {state.last}" if state.last else "no collective yet"
    return (
        f"{state.progress.phase.lower()}, backward {state.progress.backward}; {last}{wait}; "
        f"{state.where} ({state.host}, pid {state.pid})"
    )


def _name(collective: Collective | None) -> str:
    return "no collective" if collective is None else f"collective {collective.number}, {collective}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _listed(names: Sequence[str]) -> str:
    """Parameter names; those of one layer as `layer.*` where there are many."""
    if len(names) > _MANY:
        names = list(dict.fromkeys(f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names))
    shown = ", ".join(f"`{name}`" for name in names[:_MANY])
    return shown + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
