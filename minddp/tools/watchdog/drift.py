"""Are the replicas still equal? Each rank records the steps that are looked at; rank 0 compares, and explains.

[Note: a record]
A rank's record of a synchronised backward, and of the optimizer's step after it, has fingerprints by name: `prints`
of parameters and one of a `buffer`, which are compared, and what only explains a difference. Most causes of drift
show in every parameter at once. So three of them, the first, the middle and the last, are *canaries*: their first
bytes are kept `before` backward, with their `grads` after averaging, and `after` the optimizer, which has these
`hyperparameters`. A parameter that parts alone is found by its print, within a cycle of records. Since the record
before, one optimizer made at most `optimizer_steps`, and `backwards` were synchronised.

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

from minddp.platform.wording import by_value, count, joined, names, ranks, subject
from minddp.tools.watchdog.check import Check, Finding, Notes, looked_at_before
from minddp.tools.watchdog.fingerprint import Reading, cycle_of, rows_of
from minddp.tools.watchdog.misuse import CALL_THE_WRAPPER, HEAD_BYTES, BypassCheck, Named, SameDataCheck

STILL_APART = 50  # steps
MOST_OF_BUFFER = 4096  # elements
MAX_GROUPS = 8  # of an optimizer, whose hyperparameters are kept
Step = Sequence[Mapping[str, Any]]  # the record of each rank; see [Note: a record]


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
        self._open: dict[str, Any] | None = None  # the record of this step
        self._new: deque[tuple[int, dict[str, Any]]] = deque()
        self._buffer = Reading()
        self._stepped: set[int] = set()  # the optimizers that have, since the latest record
        self._recorded = 0  # the latest step
        self._starts_equal = starts_equal
        self._hook: str | None = None  # the name of the communication hook
        self._equal: deque[int] = deque(maxlen=len(self._parts))  # a cycle of the latest equal steps
        self._last: Sequence[Step] = ()  # the latest step, if there is one
        self._is_over = False

    def communication_hook(self, name: str, state: Any) -> None:
        """See [Note: replicas that differ on purpose]."""
        self._hook = name
        if type(state).__name__ == "PostLocalSGDState":
            self._is_over = True

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

    def take_notes(self, is_last: bool = False) -> Notes:
        notes: Notes = []
        while self._new and (is_last or self._new[0][1] is not self._open):
            step, record = self._new.popleft()
            read = {what: part.prints() if isinstance(part, Reading) else part for what, part in record.items()}
            notes.append((step, read))
        return notes

    def let_go(self) -> None:
        self._params, self._canaries = (), ()

    def compare(self, number: int, notes: Step) -> Iterable[Finding]:
        """See [Note: replicas that differ on purpose]."""
        if self._is_over:
            return
        found = {**differing(notes, "before"), **differing(notes, "prints"), **differing(notes, "buffer")}
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
            offenders, differ = _split(found)
            if last is None:
                since, cause = "since the first step", _FROM_THE_START
            else:
                since = f"equal {'when wrapped' if last < 0 else f'in step {last}'}, different in step {number}"
                cause = _cause([*self._last, notes], self._hook, offenders)
            text = f"The replicas differ. {differ} ({since}). {cause}"
            yield Finding("drift", "parameters", number, offenders, text)
        self._last = [notes]


def _is_plain(value: Any) -> bool:
    """False for what may print differently for no reason, as an object its address, and for what is on a device."""
    is_number = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
    return is_number or isinstance(value, (int, float, tuple))


def differing(step: Step, what: str) -> dict[str, tuple[Any, ...]]:
    """Each rank's value of what all ranks have and not all have alike, by name."""
    value_of_name = [record[what] for record in step]
    common = set.intersection(*map(set, value_of_name))
    found = {name: tuple(of_rank[name] for of_rank in value_of_name) for name in sorted(common)}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


# ------------------------------------------------------------------ in words

_FROM_THE_START = (
    "Weights were loaded or changed on one rank after the module was wrapped, or were never equal "
    "(`init_sync=False`): load them on all ranks or before wrapping, or call `ddp.synchronize()` after it."
)
_EQUAL_AGAIN = "Do it on all ranks, or call `ddp.synchronize(optimizer=optimizer)` after it."


def _split(found: Mapping[str, tuple[Any, ...]]) -> tuple[tuple[int, ...], str]:
    """The offenders, and what they have: those that are not like most ranks, or all."""
    groups = list(by_value(dict(enumerate(zip(*found.values(), strict=True)))).values())
    listed, everyone = names(sorted(found)), tuple(range(sum(map(len, groups))))
    if len(groups[0]) > len(everyone) / 2:
        others = tuple(rank for rank in everyone if rank not in groups[0])
        return others, f"{subject(others, 'has', 'have')} other values of {listed} than {ranks(groups[0])}"
    parts = joined([ranks(group) for group in groups]).capitalize()
    return everyone, f"{parts} have different values of {listed}"


def _cause(steps: Sequence[Step], hook: str | None, offenders: Sequence[int]) -> str:
    """The most probable one. All parameters that are looked at were equal in the first of one or two steps."""
    if any(differing(step, "grads") for step in steps):
        by = f"the communication hook `{hook}` gives" if hook else "the transport has given"
        return (
            f"The gradients were different already after averaging: {by} the ranks different ones. Let it give "
            f"all ranks the same; if other ones are meant (local SGD), pass on_drift=None."
        )
    if others := _different_hyperparameters(steps):
        return f"The averaged gradients were equal; {others}. Set the same on all ranks."
    where = f"on {ranks(offenders)} alone" if len(offenders) == 1 else f"differently on {ranks(offenders)}"
    written = f"has written to the parameters {where}, such as `load_state_dict`"
    if not differing(steps[-1], "before"):
        return f"Others are equal, with their gradients: something {written}, or to their gradients. {_EQUAL_AGAIN}"
    for record in steps[-1]:
        if record["optimizer_steps"] > record["backwards"]:
            return (
                f"An optimizer made {count(record['optimizer_steps'], 'step')} for "
                f"{count(record['backwards'], 'synchronised backward')}: gradients were not averaged. "
                f"{CALL_THE_WRAPPER}"
            )
    if any(differing(step, "after") and not differing(step, "before") for step in steps):
        return (
            "The averaged gradients were equal, and the optimizer made different parameters of them: its state "
            "differs (a checkpoint that one rank alone has loaded, or a rank that had run out of inputs under "
            "`join`?), its kernels round differently, or `.grad` was changed after backward, as by a second one "
            "for the same forward. `ddp.synchronize(optimizer=optimizer)` gives all ranks the state of rank 0."
        )
    if steps[-1][0]["backwards"] > 1:  # steps between were not looked at
        written += ", or to the state of the optimizer"
    equal = "The averaged gradients were equal, and no optimizer is known to differ"
    return f"{equal}: something {written}. {_EQUAL_AGAIN}"


def _different_hyperparameters(steps: Sequence[Step]) -> str:
    """`lr of group 0` is 0.1 on ranks 0 and 1, but 0.2 on rank 2."""
    found = {}
    for step in steps:
        for name, values in differing(step, "hyperparameters").items():
            of_value = by_value(dict(enumerate(values)))
            found[name] = f"`{name}` is " + ", but ".join(f"{v} on {ranks(r)}" for v, r in of_value.items())
    return joined(list(found.values())[:3])
