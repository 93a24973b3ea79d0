"""Breaks of elastic training that only a training on several ranks notices; see `test_survival_breaks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.breaks import Break


@dataclass(frozen=True)
class SurvivalBreak(Break):
    """A training of three ranks fails if member 2 has a fault: a moment, its step, and a signal or other event."""

    fault: tuple[str, int, str] = ("forward", 5, "SIGKILL")
    plan: Mapping[str, Any] = field(default_factory=dict)


SESSION, MEMBERSHIP, RANKS, TERM = (
    f"tools/elastic/{name}.py" for name in ("session", "membership", "logical_ranks", "term")
)
CONNECTION_LOST = ("vote", 5, "stuck")
TAKEN_BACK = {"restarts": 1, "steps": 20, "hold": 10, "until_members": 3}
SAVED, RESTORED = "            buffers, earlier = self._saved\n", "            self._overwrite_buffers(buffers)\n"
COUNT = "        dist.distributed_c10d._world.group_count = 0"
ATTEMPT, PATIENT = ("construction", 0, "failed attempt"), {"connect_limit_s": 600.0}
RECEIVED = "values, states, ranks.seed, {} = "

BREAKS = (
    SurvivalBreak("the verdict again is ignored", SESSION, 'if verdict == "again":', "if False:", CONNECTION_LOST),
    SurvivalBreak(
        "the first vote decides", MEMBERSHIP, "step) < len(generation.members):", "step) < 1:", CONNECTION_LOST
    ),
    SurvivalBreak(
        "buffers stay as the broken step has left them", RANKS, SAVED + RESTORED, SAVED, ("backward", 5, "SIGKILL")
    ),
    SurvivalBreak(
        "no waits are ended", TERM, " " * 16 + "self.call_off()", " " * 16 + "pass", ("vote", 5, "SIGKILL")
    ),
    SurvivalBreak("attempts to connect are counted", SESSION, COUNT, "        pass", ATTEMPT, PATIENT),
    SurvivalBreak(
        "a new rank keeps its own step",
        SESSION,
        RECEIVED.format("ranks.step"),
        RECEIVED.format("_"),
        plan=TAKEN_BACK,
    ),
)
