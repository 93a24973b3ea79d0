"""Do the ranks have cores when they want them? If not, times tell of the machine, and nothing of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minddp.doctor.facts import RankFacts
from minddp.doctor.findings import Finding, Verdict, by_value, name_ranks

BUSY = 0.2  # of the time in which a rank wants a core; alone on a machine it is a few hundredths
REMEDY = (
    "The machine is busy, see load, so this says nothing of the network. Ask again when nothing else runs there."
)


def is_busy(denied: Mapping[int, float | None]) -> bool:
    """Whether any rank lacked a core. `denied` is a share of the time, by rank; `None` where nobody can tell."""
    return any(share is not None and share > BUSY for share in denied.values())


def judge_load(facts: Mapping[int, RankFacts], denied: Mapping[int, float | None]) -> list[Finding]:
    """A finding for each host on which ranks lacked cores; nothing at all where nobody can tell."""
    known = {rank: share for rank, share in denied.items() if share is not None}
    lacking = {rank: facts[rank].machine.identity for rank, share in known.items() if share > BUSY}
    if known and not lacking:
        least = 1 - max(known.values())
        return [
            Finding(
                "load", Verdict.FINE, f"Ranks had a core for at least {least:.0%} of the time that they wanted one."
            )
        ]
    return [
        Finding(
            "load",
            Verdict.NOTE,
            f"{name_ranks(ranks).capitalize()} on {facts[ranks[0]].machine.name} had no core for up to "
            f"{max(known[rank] for rank in ranks):.0%} of the time that they wanted one: "
            f"{_who_had_it(facts, ranks)}.",
            "The times below are those of a busy machine, and say nothing of the network. End what else runs there "
            "(top), and ask again.",
        )
        for ranks in by_value(lacking).values()
    ]


def _who_had_it(facts: Mapping[int, RankFacts], ranks: Sequence[int]) -> str:
    """Each other, where they are too many; else somebody else."""
    machine = facts[ranks[0]].machine
    threads = sum(told.machine.threads for told in facts.values() if told.machine.identity == machine.identity)
    return "they take turns, see cores" if threads > machine.cores else "something else runs there"
