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


CONNECTION_LOST = ("vote", 5, "stuck")
TAKEN_BACK = {"restarts": 1, "steps": 20, "hold": 10, "until_members": 3}

BREAKS = (
    SurvivalBreak(
        "the verdict again is ignored",
        "tools/elastic/session.py",
        'if verdict == "again":',
        "if False:",
        CONNECTION_LOST,
    ),
    SurvivalBreak(
        "the first vote decides",
        "tools/elastic/membership.py",
        "step) < len(generation.members):",
        "step) < 1:",
        CONNECTION_LOST,
    ),
    SurvivalBreak(
        "buffers stay as the broken step has left them",
        "tools/elastic/logical_ranks.py",
        "            buffers, earlier = self._saved\n            self._overwrite_buffers(buffers)\n",
        "            buffers, earlier = self._saved\n",
        ("backward", 5, "SIGKILL"),
    ),
    SurvivalBreak(
        "no waits are ended",
        "tools/elastic/term.py",
        "                self.call_off()",
        "                pass",
        ("vote", 5, "SIGKILL"),
    ),
    SurvivalBreak(
        "attempts to connect are counted",
        "tools/elastic/session.py",
        "        dist.distributed_c10d._world.group_count = 0",
        "        pass",
        ("construction", 0, "failed attempt"),
        {"connect_limit_s": 600.0},
    ),
    SurvivalBreak(
        "a new rank keeps its own step",
        "tools/elastic/session.py",
        "values, states, ranks.seed, ranks.step = ",
        "values, states, ranks.seed, _ = ",
        plan=TAKEN_BACK,
    ),
)
