"""What each rank has announced about each all-reduce. Decides; touches no memory and no socket."""

from __future__ import annotations

from collections.abc import Sequence

from minddp.platform import wording
from minddp.transport.shared_memory.messages import AddendReady

SAME_CALLS = "All ranks must make the same calls in the same order."


class ReductionTracker:
    """The knowledge of rank `rank`. All-reduces are numbered from 0 in the order in which each rank launches them.

    `global_ranks` are the numbers of these ranks in the whole group, if they are only some of it.
    """

    def __init__(self, rank: int, world_size: int, global_ranks: Sequence[int] | None = None):
        self.rank = rank
        self.global_ranks = range(world_size) if global_ranks is None else global_ranks
        self.spans_hosts = global_ranks is not None

        # By rank: how many all-reduces, the first ones, it has reduced its chunk of
        self.num_done = [0] * world_size
        # Ranks that join no further collective: those that said so, with the error if there was one, and the others
        self.left: dict[int, str] = {}
        self.killed: set[int] = set()
        # By number of the all-reduce, then by rank
        self._addends: dict[int, dict[int, AddendReady]] = {}

    def add_addend(self, rank: int, addend: AddendReady) -> None:
        self._addends.setdefault(addend.reduction, {})[rank] = addend

    def next_to_reduce(self, ahead: int = 0) -> list[AddendReady] | None:
        """The addends, in rank order, of the first all-reduce that this rank has not reduced, or of a later one.

        `None` until all are ready. Raises a RuntimeError if they do not match.
        """
        addends = self._addends.get(self.num_done[self.rank] + ahead, {})
        if len(addends) < len(self.num_done):
            return None
        in_order = [addends[rank] for rank in range(len(addends))]
        first = in_order[0]
        for rank, other in zip(self.global_ranks, in_order, strict=True):
            if (other.numel, other.dtype) != (first.numel, first.dtype):
                raise RuntimeError(
                    f"In all-reduce {first.reduction} rank {self.global_ranks[0]} has {first}, but rank {rank} has "
                    f"{other}. {SAME_CALLS}"
                )
        return in_order

    def mark_reduced(self) -> None:
        """This rank has reduced its chunk of `next_to_reduce`."""
        self._addends.pop(self.num_done[self.rank])
        self.num_done[self.rank] += 1

    def is_done(self, reduction: int) -> bool:
        """True once every rank has reduced its chunk. From then on no other rank touches that memory."""
        return min(self.num_done) > reduction

    def missing(self, reduction: int) -> list[int]:
        """The other ranks that have not reduced their chunks of an all-reduce yet."""
        return [rank for rank, count in enumerate(self.num_done) if count <= reduction and rank != self.rank]

    def mark_ended(self, rank: int) -> None:
        """No more messages come from a rank."""
        if rank not in self.left:
            self.killed.add(rank)

    def reason_for_failure(self, name: str, missing: Sequence[int]) -> str | None:
        """Why the collective `name`, which needs ranks `missing`, can never complete; `None` if it still can.

        All ranks return the message of the rank that failed first, if there is one.
        """
        if killed := [rank for rank in missing if rank in self.killed]:
            return (
                f"{self._subject(killed, 'was', 'were')} killed before {name} was done. Look for the cause there "
                f"(a crash, out of memory, a signal), and start all ranks again."
            )
        if not (left := [rank for rank in missing if rank in self.left]):
            return None
        return next(
            (self.left[rank] for rank in left if self.left[rank]),
            f"{self._subject(left, 'has', 'have')} left before {name} was done: the process has ended, or its "
            f"wrapper was dropped. {SAME_CALLS}",
        )

    def timeout_error(self, reduction: int, timeout_s: float) -> str:
        """Names the ranks that the all-reduce waits for."""
        missing = self.missing(reduction)
        # Once this rank has reduced its chunk, all ranks have begun, and `_addends` has no entry any more.
        begun = missing if self.num_done[self.rank] > reduction else self._addends.get(reduction, {})
        if not_begun := [rank for rank in missing if rank not in begun]:
            state = f"{self._subject(not_begun, 'has', 'have')} not begun it."
        elif self.spans_hosts:
            state = (
                f"{self._subject(range(len(self.global_ranks)), 'has', 'have')} begun it, all ranks of this host. "
                f"So a rank on another host has not begun or is stopped, or the network between them is blocked."
            )
        else:
            state = f"{self._subject(missing, 'has', 'have')} begun it and not finished."
        return f"All-reduce {reduction} was not done within {timeout_s:g} s: {state} {SAME_CALLS}"

    def _subject(self, ranks: Sequence[int], singular: str, plural: str) -> str:
        return wording.subject([self.global_ranks[rank] for rank in ranks], singular, plural)
