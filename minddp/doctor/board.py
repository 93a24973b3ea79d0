"""A notice board in the store: how ranks that may not reach each other yet tell each other what they know.

Everything on it is JSON, under a topic and a rank. Nobody waits on it without a limit; a rank that posts nothing is
noticed by the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

from minddp.doctor.patience import Abandoned, TimeUp, patiently

_LOOK_EVERY_S = 0.05
_GRACE_S = 5.0  # to say that one has given up


class StoreLost(RuntimeError):
    """The store does not answer any more: who hosts it has ended."""


@dataclass(frozen=True)
class Outcome:
    """How a rank's part in something `ended`: done, with a `value` (JSON); or not, with an `error`.

    "abandoned" is a part given up because another rank's was not done; "silent" a rank that does not even say so.
    """

    ended: Literal["done", "failed", "out of time", "abandoned", "silent"]
    value: Any = None
    error: str = ""


class Board:
    """One rank's view of the board."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store = store
        self.rank = rank
        self.world_size = world_size

    def claim(self) -> bool:
        """Whether nobody else has claimed to be this rank before."""
        return self._ask(lambda: self._store.add(f"claimed/{self.rank}", 1)) == 1

    def post(self, topic: str, value: Any) -> None:
        """Put `value` up for all to read."""
        self._ask(lambda: self._store.set(f"{topic}/{self.rank}", json.dumps(value)))

    def read(self, topic: str, rank: int) -> Any | None:
        """What `rank` has posted; `None` if nothing yet."""
        key = f"{topic}/{rank}"
        return self._ask(lambda: json.loads(self._store.get(key)) if self._store.check([key]) else None)

    def gather(
        self,
        topic: str,
        timeout_s: float,
        waiting: Callable[[list[int], float], None] = lambda missing, waited: None,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, Any]:
        """What each rank (of `ranks`; by default all) has posted, of those that did within `timeout_s`.

        `waiting` is called over and over with the ranks that are missing and the seconds waited so far.
        """
        began = time.monotonic()
        asked = range(self.world_size) if ranks is None else ranks
        told: dict[int, Any] = {}
        while True:
            for rank in asked:
                if rank not in told and (value := self.read(topic, rank)) is not None:
                    told[rank] = value
            missing = [rank for rank in asked if rank not in told]
            waited_s = time.monotonic() - began
            if not missing or waited_s >= timeout_s:
                return {rank: told[rank] for rank in sorted(told)}
            waiting(missing, waited_s)
            time.sleep(_LOOK_EVERY_S)

    def together(self, topic: str, part: Callable[[], Any], timeout_s: float) -> dict[int, Outcome]:
        """Have each rank do its `part`, and tell how it went everywhere: the same answer on every rank.

        When one rank fails or is out of time, the others are told, and stop waiting for it.
        """
        try:
            mine = Outcome("done", patiently(part, timeout_s, useless=lambda: self._has_failed(topic)))
        except StoreLost:
            raise
        except Abandoned:
            mine = Outcome("abandoned")
        except TimeUp as error:
            mine = Outcome("out of time", error=str(error))
        except Exception as error:
            mine = Outcome("failed", error=f"{type(error).__name__}: {_first_line(error)}")
        if mine.ended in ("failed", "out of time"):
            self._ask(lambda: self._store.set(f"{topic}/failed", "1"))
        self.post(topic, asdict(mine))
        told = self.gather(topic, timeout_s + 1 if mine.ended == "done" else _GRACE_S)
        return {
            rank: Outcome(**told[rank]) if rank in told else Outcome("silent") for rank in range(self.world_size)
        }

    def _has_failed(self, topic: str) -> bool:
        return bool(self._ask(lambda: self._store.check([f"{topic}/failed"])))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from error


def is_done(outcomes: Mapping[int, Outcome]) -> bool:
    """Whether every rank's part is."""
    return all(outcome.ended == "done" for outcome in outcomes.values())


def to_blame(outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
    """The ranks to look at first: one that is silent makes others fail, and one that fails makes others wait."""
    for kind in ("silent", "failed", "out of time"):
        found = {rank: outcome for rank, outcome in outcomes.items() if outcome.ended == kind}
        if found:
            return found
    return {}


def _first_line(error: BaseException) -> str:
    """Without the C++ stack that torch appends."""
    return str(error).partition("\nException raised from")[0].strip().partition("\n")[0]
