"""Ranks, sizes, counts and lists of names as text, for messages and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 and 3`, `ranks 0-2, 5 and 7`. The numbers are sorted; three in a row become a range."""
    parts: list[str] = []
    for _, indexed in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [str(number) for _, number in indexed]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {joined(parts)}"


def subject(numbers: Sequence[int], singular: str, plural: str) -> str:
    """`Rank 2 waits`, `Ranks 0 and 3 wait`: the beginning of a sentence, with the form of the verb that fits."""
    return f"{ranks(numbers).capitalize()} {singular if len(numbers) == 1 else plural}"


def by_value(value_of_rank: Mapping[int, T]) -> dict[T, list[int]]:
    """The ranks with each value; the most frequent value first, then in the order of ranks."""
    ranks: dict[T, list[int]] = {}
    for rank, value in sorted(value_of_rank.items()):
        ranks.setdefault(value, []).append(rank)
    return dict(sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1])))


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def size(nbytes: float) -> str:
    """`17 bytes`, `64 KiB`, `1.13 MiB`, `212 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def count(number: float, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1.5 cores`."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"


def names(listed: Sequence[str], most: int = 6) -> str:
    """Names in backquotes; beyond `most`, parameters of one layer become `layer.*` and the rest is counted."""
    if len(listed) > most:
        listed = list(dict.fromkeys(f"{name.rpartition('.')[0]}.*" if "." in name else name for name in listed))
    shown = ", ".join(f"`{name}`" for name in listed[:most])
    return shown + (f" and {len(listed) - most} more" if len(listed) > most else "")


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Cells in columns, two spaces apart; `align` has "<" or ">" for each column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    )
