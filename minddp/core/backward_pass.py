"""The phases of a reducer, and all that one backward has to remember."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from minddp.core.packing import Scaling
from minddp.core.readiness import Readiness
from minddp.core.reduction import Reduction


class Phase(enum.Enum):
    """The state of the reducer. See `ALLOWED` for the transitions."""

    IDLE = "no synchronised backward is due"
    ARMED = "a forward has run; the next backward will be synchronised"
    ACCUMULATING = "hooks are firing"
    INCOMPLETE = "a backward has ended, but some gradients have not arrived"
    REDUCING = "a backward has ended, and its caller has yet to finalize it"
    FINALIZING = "waiting for the buckets"


ALLOWED = {
    Phase.IDLE: {Phase.ARMED},
    Phase.ARMED: {Phase.ARMED, Phase.ACCUMULATING},
    Phase.ACCUMULATING: {Phase.FINALIZING, Phase.INCOMPLETE, Phase.REDUCING, Phase.IDLE},
    Phase.INCOMPLETE: {Phase.ACCUMULATING},
    Phase.REDUCING: {Phase.FINALIZING},
    Phase.FINALIZING: {Phase.IDLE},
}

#: The phases in which there is a pass, and those in which optimizers are kept from stepping.
WITH_PASS = {Phase.ACCUMULATING, Phase.INCOMPLETE, Phase.REDUCING, Phase.FINALIZING}
WITH_GUARD = {Phase.INCOMPLETE, Phase.REDUCING}


@dataclass(slots=True)
class BackwardPass:
    """What one synchronised backward has to remember: made when the first hook fires, dropped at the end.

    Nothing in it is reset by hand, so nothing is left half reset by an exception. `groups_left[b]` is how many pack
    groups bucket b waits for. `reductions[b]` is `None` where a bucket was skipped; buckets from `len(reductions)` on
    have not been launched. `unused` are the parameters that this rank leaves out.
    """

    readiness: Readiness
    groups_left: list[int]
    scaling: Scaling
    unused: list[int] = field(default_factory=list)
    reductions: list[Reduction | None] = field(default_factory=list)

    @property
    def all_launched(self) -> bool:
        return len(self.reductions) == len(self.groups_left)

    @property
    def next_is_ready(self) -> bool:
        """True if the bucket at the head of the plan waits for nothing."""
        return not self.all_launched and self.groups_left[len(self.reductions)] == 0

    def ready_order(self) -> list[int]:
        """Every parameter once: as they became ready, and then those that are unused."""
        unused = set(self.unused)
        return [param for param in self.readiness.ready_order if param not in unused] + self.unused
