"""Which rank has announced what about which all-reduce, and what follows. Decides; touches no memory or socket."""

from __future__ import annotations

from collections.abc import Sequence

from minddp.platform import wording
from minddp.transport.shared_memory.messages import AddendReady

SAME_CALLS = "All ranks must make the same calls in the same order."


class ReductionTracker:
    """What rank `rank` knows. All-reduces are numbered from 0 in the order in which each rank launches them.

    `num_done[r]`: rank r has reduced its chunks of so many all-reduces, the first ones. `left[r]`: rank r takes
    part in no more collectives, and why, unless it is simply done. `killed`: ranks that ended without such a
    message. `names[r]`: the rank r in errors, where these ranks are some of a larger group.
    """

    def __init__(self, rank: int, world_size: int, names: Sequence[int] | None = None):
        self.rank = rank
        self.names = range(world_size) if names is None else names
        self.spans_hosts = names is not None
        self.num_done = [0] * world_size
        self.left: dict[int, str] = {}
        self.killed: set[int] = set()
        self._addends: dict[int, dict[int, AddendReady]] = {}  # by number of the all-reduce, then by rank

    def note_addend(self, rank: int, addend: AddendReady) -> None:
        self._addends.setdefault(addend.reduction, {})[rank] = addend

    def next_to_reduce(self, ahead: int = 0) -> list[AddendReady] | None:
        """The addends, in rank order, of the first all-reduce that this rank has not reduced, once all are ready.

        With `ahead`, of the all-reduce that many after it. Raises a RuntimeError if they do not match.
        """
        addends = self._addends.get(self.num_done[self.rank] + ahead, {})
        if len(addends) < len(self.num_done):
            return None
        in_order = [addends[rank] for rank in range(len(addends))]
        first = in_order[0]
        for name, other in zip(self.names, in_order, strict=True):
            if (other.numel, other.dtype) != (first.numel, first.dtype):
                raise RuntimeError(
                    f"in all-reduce {first.reduction} rank {self.names[0]} has {first}, but rank {name} has "
                    f"{other}. {SAME_CALLS}"
                )
        return in_order

    def note_reduced(self) -> None:
        """This rank has reduced its chunk of `next_to_reduce`."""
        self._addends.pop(self.num_done[self.rank])
        self.num_done[self.rank] += 1

    def is_done(self, reduction: int) -> bool:
        """True once every rank has reduced its chunk: then no other rank touches that memory any more."""
        return min(self.num_done) > reduction

    def missing(self, reduction: int) -> list[int]:
        """The other ranks that have not reduced their chunks of an all-reduce yet."""
        return [rank for rank, count in enumerate(self.num_done) if count <= reduction and rank != self.rank]

    def note_end(self, rank: int) -> None:
        """No more messages come from a rank."""
        if rank not in self.left:
            self.killed.add(rank)

    def reason_for_failure(self, name: str, missing: Sequence[int]) -> str | None:
        """Why the collective `name`, which needs ranks `missing`, can never complete; `None` if it still can.

        It is the text of the rank that failed first, so that all ranks raise the same.
        """
        killed = [rank for rank in missing if rank in self.killed]
        if killed:
            return (
                f"{self._subject(killed, 'was', 'were')} killed before {name} was done. Look for the cause there "
                f"(a crash, out of memory, a signal), and start all ranks again."
            )
        left = [rank for rank in missing if rank in self.left]
        if not left:
            return None
        return next(
            (self.left[rank] for rank in left if self.left[rank]),
            f"{self._subject(left, 'has', 'have')} left before {name} was done: the process has ended, or its "
            f"wrapper was dropped. {SAME_CALLS}",
        )

    def overdue(self, reduction: int, timeout_s: float) -> str:
        """The error of an all-reduce that has exceeded its time limit: names the ranks that it lacks."""
        missing = self.missing(reduction)
        # Once this rank has reduced its chunk all ranks have begun, and the addends are forgotten.
        begun = missing if self.num_done[self.rank] > reduction else self._addends.get(reduction, {})
        not_begun = [rank for rank in missing if rank not in begun]
        if not_begun:
            lacks = f"{self._subject(not_begun, 'has', 'have')} not begun it."
        elif self.spans_hosts:
            lacks = (
                f"{self._subject(range(len(self.names)), 'has', 'have')} begun it, all that this host has; so a "
                f"rank on another host has not, or is stopped, or the network between them is stuck."
            )
        else:
            lacks = f"{self._subject(missing, 'has', 'have')} begun it and not finished."
        return f"All-reduce {reduction} was not done within {timeout_s:g} s: {lacks} {SAME_CALLS}"

    def _subject(self, ranks: Sequence[int], singular: str, plural: str) -> str:
        return wording.subject([self.names[rank] for rank in ranks], singular, plural)
