"""What the doctor says: a finding for each thing checked. Also the few turns of phrase that all findings share."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class Verdict(enum.IntEnum):
    """How bad it is. A job works with all but the last."""

    FINE = 0
    NOTE = 1  # worth knowing
    BROKEN = 2


@dataclass(frozen=True)
class Finding:
    """The `fact` that a check has found, and the `remedy` if there is something to do."""

    check: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def is_broken(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict is Verdict.BROKEN for finding in findings)


def by_value(value_of_rank: Mapping[int, T]) -> dict[T, list[int]]:
    """Which ranks have which value; the value that most have first, then by rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in sorted(value_of_rank.items()):
        ranks.setdefault(value, []).append(rank)
    return dict(sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1])))


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`, `ranks 0-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(shown)}"


def differing(value_of_rank: Mapping[int, str]) -> str:
    """`2.13.0 on ranks 0-2, 2.12.1 on rank 3`."""
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value(value_of_rank).items())


def size(nbytes: float) -> str:
    """In binary units: `64 KiB`, `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def count(number: float, noun: str) -> str:
    """`1 rank`, `2 ranks`; also of fractions, as in `1.5 cores`."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
