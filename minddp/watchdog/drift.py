"""Are the replicas still equal? Each rank records the steps that are looked at, and rank 0 compares.

The parameters are compared; gradients and hyperparameters only explain, in `drift_cause.py`.

[Note: canaries]
Most causes of drift show in every parameter at once. So three of them, the first, the middle and the last, are
*canaries*: their first bytes are kept in each record, before backward, with their gradients after averaging, and
after the optimizer. A parameter that parts alone is found by its fingerprint, within a cycle of records.

[Note: replicas that differ on purpose]
With `init_sync=False`, or after the group has changed, ranks may begin with different weights, for instance because
one of them is about to be healed. Such a difference is reported when it is still there after `STILL_APART` steps.
Post-local SGD lets replicas drift and averages them from time to time: its communication hook switches this check
off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from minddp.watchdog.check import Check, Finding, Notes, looked_at_before
from minddp.watchdog.drift_cause import differences, differing, explain
from minddp.watchdog.fingerprint import Reading, cycle_of, rows_of
from minddp.watchdog.misuse import HEAD_BYTES, BypassCheck, Named, SameDataCheck

STILL_APART = 50  # steps
MOST_OF_BUFFER = 4096  # elements
MAX_GROUPS = 8  # of an optimizer, whose hyperparameters are kept


def checks_of_drift(params: Named, *, starts_equal: bool) -> dict[str, Check]:
    """All checks of whether the replicas stay equal, and learn from different data. `params` by name.

    `starts_equal`: the replicas were made equal at construction.
    """
    here = [(name, param) for name, param in params if param.device == params[0][1].device and param.numel()]
    canaries = [here[place] for place in sorted({0, len(here) // 2, len(here) - 1})] if here else []
    return {
        "drift": DriftCheck(here, canaries, starts_equal=starts_equal),
        "bypass": BypassCheck(canaries),
        "same data": SameDataCheck(),
    }


class DriftCheck(Check):
    """`params` are on one device, `canaries` some of them."""

    def __init__(self, params: Named, canaries: Named, *, starts_equal: bool):
        self._params = params
        self._parts = cycle_of([param for _, param in params])
        self._canaries = canaries
        self._open: dict[str, Any] | None = None  # the record of this step; see [Note: a record]
        self._new: deque[tuple[int, dict[str, Any]]] = deque()
        self._buffer = Reading()
        self._stepped: set[int] = set()  # the optimizers that have, since the latest record
        self._recorded = 0  # the latest step
        self._starts_equal = starts_equal
        self._hook: str | None = None  # the name of the communication hook
        self._equal: deque[int] = deque(maxlen=len(self._parts))  # a cycle of the latest equal steps
        self._last: Sequence[Any] = ()  # all ranks' records of the latest step, if there is one
        self._is_over = False

    def communication_hook(self, name: str, state: Any) -> None:
        """See [Note: replicas that differ on purpose]."""
        self._hook = name
        if type(state).__name__ == "PostLocalSGDState":
            self._is_over = True

    # ------------------------------------------------------------------ the thread that trains

    def buffers_synchronised(self, step: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """Fingerprints the beginning of one of them, in turn, as this forward may change it."""
        named = [(name, buffer) for name, buffer in buffers.items() if buffer.device == self._params[0][1].device]
        if named:
            name, buffer = named[looked_at_before(step) % len(named)]
            self._buffer = Reading([(name, buffer.detach().flatten()[:MOST_OF_BUFFER])])

    def backward_begins(self, step: int, optimizer_steps: int) -> None:
        pieces = self._parts[looked_at_before(step) % len(self._parts)]
        named = [(*self._params[piece.tensor], piece) for piece in pieces]
        self._open = {
            "prints": Reading((name, rows_of(param, piece)) for name, param, piece in named),
            "buffer": self._buffer,
            "before": Reading(self._canaries, HEAD_BYTES),
            "grads": Reading(),
            "after": Reading(),
            "hyperparameters": {},
            "optimizer_steps": optimizer_steps,
            "backwards": step - self._recorded,
        }
        self._new.append((step, self._open))
        self._buffer = Reading()
        self._recorded = step
        self._stepped.clear()

    def backward_over(self) -> None:
        if self._open is not None:
            self._open["grads"] = Reading([(name, param.grad) for name, param in self._canaries], HEAD_BYTES)

    def optimizer_over(self, optimizer: torch.optim.Optimizer) -> None:
        if self._open is not None and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            self._open["after"] = Reading(self._canaries, HEAD_BYTES)
            self._open["hyperparameters"] = {
                f"{name} of group {number}": str(value)
                for number, group in enumerate(optimizer.param_groups[:MAX_GROUPS])
                for name, value in group.items()
                if _is_plain(value)
            }

    # ------------------------------------------------------------------ the guard's thread

    def take_notes(self, is_last: bool = False) -> Notes:
        notes: Notes = []
        while self._new and (is_last or self._new[0][1] is not self._open):
            step, record = self._new.popleft()
            notes.append(
                (step, {k: part.prints() if isinstance(part, Reading) else part for k, part in record.items()})
            )
        return notes

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """See [Note: replicas that differ on purpose]."""
        if self._is_over:
            return
        found = differences(notes)
        were_all_equal = len(self._equal) == self._equal.maxlen  # one after the other
        if not found:
            self._equal.append(number)
        elif not (self._starts_equal or were_all_equal or number >= STILL_APART):
            self._equal.clear()
        else:
            self._is_over = True
            last = -1 if self._starts_equal and number > 0 else None
            if self._equal and differing(notes, "before"):
                last = self._equal[-1]
            elif were_all_equal:
                last = self._equal[0]
            yield explain(number, found, [*self._last, notes], last, self._hook)
        self._last = [notes]


def _is_plain(value: Any) -> bool:
    """False for what may print differently for no reason, as an object its address, and for what is on a device."""
    is_number = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
    return is_number or isinstance(value, (int, float, tuple))
