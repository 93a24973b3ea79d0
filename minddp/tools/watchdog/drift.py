"""Are the replicas still equal? Each rank records the sampled steps; rank 0 compares the records and explains.

[Note: a record]
A rank records a synchronised backward and the optimizer's step after it. `prints`, fingerprints of parameters by
name, are compared. The rest explains a difference. Most causes of drift show in every parameter at once, so three
parameters, the first, the middle and the last, are *canaries*: a record has their first bytes `before` backward,
their `grads` after averaging, their first bytes `after` the optimizer, and its `hyperparameters`. A parameter that
differs alone is found by its print, within a cycle of records. Since the previous record, one optimizer made at
most `optimizer_steps` steps, and `backwards` backwards were synchronised.

[Note: replicas that differ on purpose]
With `init_sync=False`, or after the group has changed, ranks may begin with different weights, for instance until
one of them is restored. Such a difference is reported if it persists after `STILL_APART` steps. Post-local SGD lets
replicas drift and averages them from time to time: its communication hook switches this check off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from minddp.platform.wording import by_value, count, joined, names, ranks, subject
from minddp.tools.watchdog.check import Check, Finding, Notes, num_sampled_before
from minddp.tools.watchdog.fingerprint import Reading, cycle_of, rows_of
from minddp.tools.watchdog.misuse import CALL_THE_WRAPPER, HEAD_BYTES, BypassCheck, NamedParams, SameDataCheck

STILL_APART = 50  # steps
MAX_GROUPS = 8  # of an optimizer, whose hyperparameters are recorded
Records = Sequence[Mapping[str, Any]]  # by rank, of one step; see [Note: a record]


def checks_of_drift(params: NamedParams, *, starts_equal: bool) -> dict[str, Check]:
    """All checks that the replicas stay equal and learn from different data.

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
    """`params` are on one device; `canaries` are some of them."""

    def __init__(self, params: NamedParams, canaries: NamedParams, *, starts_equal: bool):
        # Of this rank: its records.
        self._params = params
        self._parts = cycle_of([param for _, param in params])
        self._canaries = canaries
        self._current: dict[str, Any] = {}  # the record of this step
        self._new: deque[tuple[int, dict[str, Any]]] = deque()
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped since the latest record began
        self._recorded = 0  # the latest recorded step
        # Of rank 0: what it knows from comparing.
        self._starts_equal = starts_equal
        self._hook: str | None = None  # the name of the communication hook
        self._equal: deque[int] = deque(maxlen=len(self._parts))  # a cycle of the latest steps without a difference
        self._previous: Sequence[Records] = ()  # the previous step, if there is one
        self._is_over = False

    def communication_hook(self, name: str, state: Any) -> None:
        """See [Note: replicas that differ on purpose]."""
        self._hook = name
        if type(state).__name__ == "PostLocalSGDState":
            self._is_over = True

    def first_gradient(self, step: int, optimizer_steps: int) -> None:
        pieces = self._parts[num_sampled_before(step) % len(self._parts)]
        named = [(*self._params[piece.tensor], piece) for piece in pieces]
        self._current = {
            "prints": Reading((name, rows_of(param, piece)) for name, param, piece in named),
            "before": Reading(self._canaries, HEAD_BYTES),
            "grads": Reading(),
            "after": Reading(),
            "hyperparameters": {},
            "optimizer_steps": optimizer_steps,
            "backwards": step - self._recorded,
        }
        self._new.append((step, self._current))
        self._recorded = step
        self._stepped.clear()

    def post_backward(self) -> None:
        self._current["grads"] = Reading([(name, param.grad) for name, param in self._canaries], HEAD_BYTES)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            self._current["after"] = Reading(self._canaries, HEAD_BYTES)
            self._current["hyperparameters"] = {
                f"{name} of group {number}": str(value)
                for number, group in enumerate(optimizer.param_groups[:MAX_GROUPS])
                for name, value in group.items()
                if _is_plain(value)
            }

    def take_notes(self, is_last: bool = False) -> Notes:
        notes: Notes = []
        while self._new and (is_last or self._new[0][1] is not self._current):
            step, record = self._new.popleft()
            read = {key: part.prints() if isinstance(part, Reading) else part for key, part in record.items()}
            notes.append((step, read))
        return notes

    def release(self) -> None:
        self._params, self._canaries = (), ()

    def compare(self, number: int, notes: Records) -> Iterable[Finding]:
        """See [Note: replicas that differ on purpose]."""
        if self._is_over:
            return
        found = {**differing(notes, "before"), **differing(notes, "prints")}
        were_all_equal = len(self._equal) == self._equal.maxlen
        if not found:
            self._equal.append(number)
        elif not (self._starts_equal or were_all_equal or number >= STILL_APART):
            self._equal.clear()
        else:
            self._is_over = True
            last_equal = -1 if self._starts_equal and number > 0 else None
            if self._equal and differing(notes, "before"):
                last_equal = self._equal[-1]
            elif were_all_equal:
                last_equal = self._equal[0]
            offenders, differ = _split(found)
            if last_equal is None:
                since, cause = "since the first step", _FROM_THE_START
            else:
                begin = "when wrapped" if last_equal < 0 else f"in step {last_equal}"
                since = f"equal {begin}, different in step {number}"
                cause = _cause([*self._previous, notes], self._hook, offenders)
            text = f"The replicas differ. {differ} ({since}). {cause}"
            yield Finding("drift", "parameters", number, offenders, text)
        self._previous = [notes]


def _is_plain(value: Any) -> bool:
    """False for a value on a device, and for an object whose text may have its address."""
    is_number = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
    return is_number or isinstance(value, (int, float, tuple))


def differing(records: Records, key: str) -> dict[str, tuple[Any, ...]]:
    """By name, each rank's values of those names that all ranks have, where the values differ."""
    value_of_name = [record[key] for record in records]
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
    """The offenders and their difference: the ranks that differ from most ranks, or all ranks."""
    groups = list(by_value(dict(enumerate(zip(*found.values(), strict=True)))).values())
    listed, everyone = names(sorted(found)), tuple(range(sum(map(len, groups))))
    if len(groups[0]) > len(everyone) / 2:
        others = tuple(rank for rank in everyone if rank not in groups[0])
        return others, f"{subject(others, 'has', 'have')} other values of {listed} than {ranks(groups[0])}"
    parts = joined([ranks(group) for group in groups]).capitalize()
    return everyone, f"{parts} have different values of {listed}"


def _cause(steps: Sequence[Records], hook: str | None, offenders: Sequence[int]) -> str:
    """The most probable cause. `steps` are one or two; in the first, all compared parameters were equal."""
    if any(differing(records, "grads") for records in steps):
        by = f"communication hook `{hook}`" if hook else "transport"
        return (
            f"The averaged gradients were different already: the {by} returns different ones on each rank. Return "
            f"the same on all ranks; if the replicas are meant to differ (local SGD), pass on_drift=None."
        )
    if others := _different_hyperparameters(steps):
        return f"The averaged gradients were equal; {others}. Set the same on all ranks."
    where = f"on {ranks(offenders)} alone" if len(offenders) == 1 else f"differently on {ranks(offenders)}"
    written = f"has written to the parameters {where}, such as `load_state_dict`"
    if not differing(steps[-1], "before"):
        others = "The other compared parameters and their gradients are equal"
        return f"{others}: something {written}, or to their gradients. {_EQUAL_AGAIN}"
    for record in steps[-1]:
        if record["optimizer_steps"] > record["backwards"]:
            return (
                f"An optimizer made {count(record['optimizer_steps'], 'step')} for "
                f"{count(record['backwards'], 'synchronised backward')}: gradients were not averaged. "
                f"{CALL_THE_WRAPPER}"
            )
    if any(differing(records, "after") and not differing(records, "before") for records in steps):
        return (
            "The averaged gradients were equal, but the optimizer computed different parameters: its state differs "
            "(only one rank has loaded a checkpoint, or a rank ran out of inputs under `join`), its kernels round "
            "differently, or `.grad` was changed after backward, for example by a second backward of the same "
            "forward. `ddp.synchronize(optimizer=optimizer)` gives all ranks the state of rank 0."
        )
    if steps[-1][0]["backwards"] > 1:  # there were steps between that were not sampled
        written += ", or to the state of the optimizer"
    equal = "The averaged gradients were equal, and no optimizer is known to differ"
    return f"{equal}: something {written}. {_EQUAL_AGAIN}"


def _different_hyperparameters(steps: Sequence[Records]) -> str:
    """`lr of group 0` is 0.1 on ranks 0 and 1, but 0.2 on rank 2."""
    found = {}
    for records in steps:
        for name, values in differing(records, "hyperparameters").items():
            of_value = by_value(dict(enumerate(values)))
            found[name] = f"`{name}` is " + ", but ".join(f"{v} on {ranks(r)}" for v, r in of_value.items())
    return joined(list(found.values())[:3])
