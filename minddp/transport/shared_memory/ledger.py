"""Who has said what about which all-reduce, and what follows from it. Decides; touches no memory and no socket."""

from __future__ import annotations

from collections.abc import Sequence

from minddp.transport.shared_memory.messages import Addend

SAME_CALLS = "All ranks must make the same calls in the same order."


class Ledger:
    """What rank `rank` knows. All-reduces are numbered from 0 in the order in which each rank launches them.

    `num_done[r]`: rank r has done its chunks of so many all-reduces, the first ones. `left[r]`: rank r takes no
    further part, and why, if not because it is done. `killed`: ranks that fell silent without a farewell.
    `names[r]`: what rank r is called in errors, if these ranks are some of a larger group.
    """

    def __init__(self, rank: int, world_size: int, names: Sequence[int] | None = None):
        self.rank = rank
        self.names = range(world_size) if names is None else names
        self.num_done = [0] * world_size
        self.left: dict[int, str] = {}
        self.killed: set[int] = set()
        self._addends: dict[int, dict[int, Addend]] = {}  # by number of the all-reduce, then by rank

    def note_addend(self, rank: int, addend: Addend) -> None:
        self._addends.setdefault(addend.reduction, {})[rank] = addend

    def next_to_add_up(self, ahead: int = 0) -> list[Addend] | None:
        """The addends, in rank order, of the first all-reduce that we have not done our part of; once all are in.

        With `ahead`, of that so many after it.

        Raises:
            RuntimeError: they do not match.
        """
        addends = self._addends.get(self.num_done[self.rank] + ahead, {})
        if len(addends) < len(self.num_done):
            return None
        in_order = [addends[rank] for rank in range(len(addends))]
        self._require_one_kind(in_order)
        return in_order

    def note_added_up(self) -> None:
        """We have done our chunk of `next_to_add_up`."""
        self._addends.pop(self.num_done[self.rank])
        self.num_done[self.rank] += 1

    def is_done(self, reduction: int) -> bool:
        """By every rank: the sum may be used, and nobody else touches that memory any more."""
        return min(self.num_done) > reduction

    def missing(self, reduction: int) -> list[int]:
        """The ranks that have not yet said all they will have to say about an all-reduce."""
        return [rank for rank, count in enumerate(self.num_done) if count <= reduction and rank != self.rank]

    def note_silence(self, rank: int) -> None:
        """Nothing more will come from a rank."""
        if rank not in self.left:
            self.killed.add(rank)

    def lost(self, name: str, missing: Sequence[int]) -> str | None:
        """Why what is called `name`, and waits for ranks `missing`, can never be done, if so.

        In the words of who gave up first, so all say the same.
        """
        killed = [rank for rank in missing if rank in self.killed]
        if killed:
            return (
                f"{self._ranks(killed, 'was', 'were')} killed before {name} was done. Look for the "
                f"cause there (a crash, no memory left, a signal), and start all ranks again."
            )
        left = [rank for rank in missing if rank in self.left]
        if not left:
            return None
        leaving = f"{self._ranks(left, 'has', 'have')} left before {name} was done"
        return next(
            (self.left[rank] for rank in left if self.left[rank]),
            f"{leaving}: the process has ended, or its wrapper was dropped. {SAME_CALLS}",
        )

    def overdue(self, reduction: int, timeout_s: float) -> str:
        """Whom an all-reduce has waited for when its time was up."""
        not_begun = [rank for rank in self.missing(reduction) if not self._has_begun(rank, reduction)]
        culprits = (
            f"{self._ranks(not_begun, 'has', 'have')} not begun it."
            if not_begun
            else f"{self._ranks(self.missing(reduction), 'has', 'have')} begun it and not finished."
        )
        return f"All-reduce {reduction} was not done within {timeout_s:g} s: {culprits} {SAME_CALLS}"

    def untold(self, name: str, source: int, timeout_s: float) -> str:
        """When the time of a broadcast is up."""
        return f"{name.capitalize()} has not come within {timeout_s:g} s. {SAME_CALLS}"

    def _has_begun(self, rank: int, reduction: int) -> bool:
        """Once we have done our part everybody has, and the addends are forgotten."""
        return self.num_done[self.rank] > reduction or rank in self._addends.get(reduction, {})

    def _require_one_kind(self, addends: Sequence[Addend]) -> None:
        first, ours = self.names[0], addends[0]
        for name, theirs in zip(self.names, addends, strict=True):
            if (theirs.numel, theirs.dtype) != (ours.numel, ours.dtype):
                raise RuntimeError(
                    f"in all-reduce {ours.reduction} rank {first} has {ours}, but rank {name} has {theirs}. "
                    f"{SAME_CALLS}"
                )

    def _ranks(self, ranks: Sequence[int], one: str, several: str) -> str:
        names = [str(self.names[rank]) for rank in ranks]
        return f"Rank {names[0]} {one}" if len(names) == 1 else f"Ranks {', '.join(names)} {several}"
