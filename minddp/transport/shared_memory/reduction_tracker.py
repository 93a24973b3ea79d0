"""What each rank has announced about each all-reduce. Decides; touches no memory and no socket."""

from __future__ import annotations

from collections.abc import Sequence

from minddp.platform import wording
from minddp.transport.shared_memory.messages import AddendReady, Ended, Leaving

SAME_CALLS = "All ranks must make the same calls in the same order."


class ReductionTracker:
    """The knowledge of rank `rank` about the `ranks` of its host.

    All-reduces are numbered from 0 in the order in which each rank launches them.
    """

    def __init__(self, rank: int, ranks: Sequence[int]):
        self.rank = rank
        self.num_done = dict.fromkeys(ranks, 0)  # how many all-reduces a rank has reduced its chunk of
        self.ended: dict[int, Leaving | Ended] = {}  # ranks that join no further all-reduce
        self._addends: dict[int, dict[int, AddendReady]] = {}  # by number of the all-reduce, then by rank

    def add_addend(self, rank: int, addend: AddendReady) -> None:
        self._addends.setdefault(addend.reduction, {})[rank] = addend

    def next_to_reduce(self, ahead: int = 0) -> list[AddendReady] | None:
        """The addends, in rank order, of the first all-reduce that this rank has not reduced, or of a later one.

        `None` until all are ready. Raises a RuntimeError if they do not match.
        """
        addends = self._addends.get(self.num_done[self.rank] + ahead, {})
        if len(addends) < len(self.num_done):
            return None
        first_rank, first = min(addends.items())
        for rank, other in addends.items():
            if (other.numel, other.dtype) != (first.numel, first.dtype):
                raise RuntimeError(
                    f"In all-reduce {first.reduction} rank {first_rank} has {first}, but rank {rank} has {other}. "
                    f"{SAME_CALLS}"
                )
        return [addends[rank] for rank in self.num_done]

    def mark_reduced(self) -> None:
        """This rank has reduced its chunk of `next_to_reduce`."""
        self._addends.pop(self.num_done[self.rank])
        self.num_done[self.rank] += 1

    def is_done(self, reduction: int) -> bool:
        """True once every rank has reduced its chunk. From then on no other rank touches that memory."""
        return min(self.num_done.values()) > reduction

    def reason_for_failure(self, reduction: int) -> str | None:
        """Why an all-reduce can never be done; `None` if it still can."""
        for rank, last_message in self.ended.items():
            if self.num_done[rank] > reduction:
                continue
            match last_message:
                case Ended():
                    return (
                        f"Rank {rank} was killed before all-reduce {reduction} was done. Look for the cause there "
                        f"(a crash, out of memory, a signal), and start all ranks again."
                    )
                case Leaving(""):
                    return (
                        f"Rank {rank} has left before all-reduce {reduction} was done: the process has ended, or "
                        f"its wrapper was dropped. {SAME_CALLS}"
                    )
                case Leaving(reason):  # the failure of that rank, or one that it has heard of
                    return reason
        return None

    def timeout_error(self, reduction: int, timeout_s: float) -> str:
        """Names the ranks that the all-reduce waits for."""
        missing = [rank for rank, count in self.num_done.items() if count <= reduction]
        # Once this rank has reduced its chunk, all ranks have begun, and `_addends` has no entry any more.
        begun = missing if self.num_done[self.rank] > reduction else self._addends.get(reduction, {})
        if not_begun := [rank for rank in missing if rank not in begun]:
            state = f"{wording.subject(not_begun, 'has', 'have')} not begun it."
        else:
            state = (
                f"{wording.subject(missing, 'has', 'have')} begun it and not finished: a process is stopped, or "
                f"waits for another host."
            )
        return f"All-reduce {reduction} was not done within {timeout_s:g} s: {state} {SAME_CALLS}"
