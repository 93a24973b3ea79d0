"""Messages between ranks through the store, before the ranks are connected to each other.

A message is JSON under a topic and a rank. Every wait has a time limit; a rank that posts nothing shows as missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from minddp.platform.store import values_within
from minddp.platform.time_limits import Unfinished, call_with_limit

FAREWELL_S = 5.0  # how long a rank that has failed waits for the outcomes of the others
SILENT = "no answer"
GAVE_UP = "gave up because another rank had failed"


def first_line(error: BaseException) -> str:
    """The message without the C++ stack that torch appends."""
    return str(error).strip().partition("\n")[0]


@dataclass(frozen=True)
class StoreExchange:
    """One rank's access to the messages of all ranks. Every method raises a DistError if the store is gone."""

    store: dist.Store
    rank: int
    world_size: int

    def post(self, topic: str, value: Any) -> None:
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))

    def gather(self, topic: str, limit_s: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The messages that `ranks` (default: all) have posted within the time limit."""
        keys = {rank: f"{topic}/{rank}" for rank in (range(self.world_size) if ranks is None else ranks)}
        return {rank: json.loads(text) for rank, text in values_within(self.store, keys, limit_s).items()}

    def run_on_all(
        self, topic: str, part: Callable[[], Any], limit_s: float
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Run `part` on every rank, until one fails; every rank gets the JSON values and the errors by rank.

        Only the errors to look at first: a silent rank makes others fail, and a failed rank makes others give up.
        """
        value, error = None, ""
        failed = f"{topic}/failed"
        try:
            value = call_with_limit(part, limit_s, lambda: GAVE_UP if self.store.check([failed]) else "")
        except Unfinished as unfinished:
            error = str(unfinished)
        except Exception as raised:
            error = f"{type(raised).__name__}: {first_line(raised)}"
        if error not in ("", GAVE_UP):
            self.store.set(failed, "1")
        self.post(topic, [value, error])
        received = self.gather(topic, FAREWELL_S if error else limit_s + 1)
        values = {rank: value for rank, (value, error) in received.items() if not error}
        errors = {rank: error for rank, (_, error) in received.items() if error not in ("", GAVE_UP)}
        return values, {rank: SILENT for rank in range(self.world_size) if rank not in received} or errors
