"""Are the replicas still equal? Each rank records the sampled steps; rank 0 compares the records and explains.

[Note: a record]
A rank records a synchronised backward and the optimizer's step after it. `params`, fingerprints of the parameters
before that step, are compared. The rest explains a difference: fingerprints of `grads` after averaging, the
optimizer's `hyperparameters` and its `state` after the step (in the first steps, as long as it shows what was
loaded), and since the previous record the steps of one optimizer and the `backwards`.

[Note: replicas that differ on purpose]
With `init_sync=False`, or after the group has changed, ranks may begin with different weights, for instance until
one of them is restored. So nothing is compared in the first `STILL_APART` steps. Post-local SGD lets replicas drift
and averages them from time to time: its communication hook switches this check off. Where it is not known when
gradients are averaged, replicas have `patience` steps to become equal again, and as many samples once they did.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from minddp.platform.wording import by_value, count, joined, names, ranks, subject
from minddp.tools.watchdog.check import FIRST, Check, Finding, Notes, is_sampled
from minddp.tools.watchdog.fingerprint import Reading
from minddp.tools.watchdog.misuse import CALL_THE_WRAPPER, NamedParams

STILL_APART = 50  # steps
MAX_GROUPS = 8  # of an optimizer, whose hyperparameters are recorded
Records = Sequence[Mapping[str, Any]]  # by rank, of one step; see [Note: a record]


class DriftCheck(Check):
    """`params` are on one device. `starts_equal`: the replicas were made equal at construction.

    `reducer` averages the gradients; empty if it is not known what does. Parameters of a name are replicas, on
    two ranks at least.
    """

    def __init__(self, params: NamedParams, *, starts_equal: bool, patience: int = 0, reducer: str = "transport"):
        # Of this rank: its records.
        self._params = params
        self._current: dict[str, Any] | None = None  # the record of this step, if it is sampled
        self._new: deque[tuple[int, dict[str, Any]]] = deque()
        self._recorded = 0  # the latest recorded step
        self._optimizer_steps: Counter[int] = Counter()  # since the latest record, by id of the optimizer
        # Of rank 0: what it knows from comparing.
        self._starts_equal, self._patience, self._reducer = starts_equal, patience, reducer
        self._hook: str | None = None  # the name of the communication hook
        self._equal: tuple[int, Records] | None = None  # the latest step, if it was compared
        self._apart: list[tuple[int, Records]] = []  # the steps since in which replicas differed
        self._has_met_again = False
        self._is_over = False

    def communication_hook(self, name: str, state: Any) -> None:
        """See [Note: replicas that differ on purpose]."""
        self._hook = name
        if type(state).__name__ == "PostLocalSGDState":
            self._is_over = True

    def first_gradient(self, step: int) -> None:
        self._current = None
        if is_sampled(step):
            self._current = {
                "step": step,
                "params": Reading(self._params),
                "grads": Reading(),
                "hyperparameters": {},
                "state": Reading(),
                "optimizer_steps": max(self._optimizer_steps.values(), default=0),
                "backwards": step - self._recorded,
            }
            self._new.append((step, self._current))
            self._recorded = step
            self._optimizer_steps.clear()

    def post_backward(self) -> None:
        if self._current is not None:
            self._current["grads"] = Reading((name, param.grad) for name, param in self._params)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_steps[id(optimizer)] += 1
        if self._current is not None:
            if self._current["step"] < FIRST:
                self._current["state"] = Reading(state_of(optimizer, self._params))
            self._current["hyperparameters"] = {
                f"{name} of group {number}": str(value)
                for number, group in enumerate(optimizer.param_groups[:MAX_GROUPS])
                for name, value in group.items()
                if isinstance(value, (int, float, tuple))
            }

    def take_notes(self, is_last: bool = False) -> Notes:
        notes: Notes = []
        while self._new and (is_last or self._new[0][1] is not self._current):
            step, record = self._new.popleft()
            read = {key: record[key].prints() for key in ("params", "grads", "state")}
            notes.append((step, record | read))
        return notes

    def release(self) -> None:
        self._params = ()

    def compare(self, number: int, notes: Records) -> Iterable[Finding]:
        """See [Note: replicas that differ on purpose]."""
        if self._is_over or not (self._starts_equal or number >= STILL_APART):
            return
        if differing(notes, "params"):
            self._apart.append((number, notes))
            if self._patience and self._meets_again():
                self._apart, self._has_met_again = [], True
            elif len(self._apart) >= self._patience or not self._has_met_again:
                (first, records), since = self._apart[0], number - self._apart[0][0]
                if since >= self._patience:
                    self._is_over = True
                    yield self._finding(first, records)
            return
        self._has_met_again |= bool(self._apart)
        self._equal, self._apart = (number, notes), []
        if not common_names(notes) and (cause := _hyperparameters(notes)):  # nothing else can show it
            self._is_over = True
            everyone = tuple(range(len(notes)))
            yield Finding("drift", "parameters", number, everyone, f"{cause} The ranks train one model.")

    def _meets_again(self) -> bool:
        """The replicas have had common values since, perhaps after different numbers of steps."""
        values = [{tuple(record["params"].items()) for record in of_rank} for of_rank in self._of_ranks()]
        return len(self._apart) > 1 and bool(set.intersection(*values))

    def _of_ranks(self) -> list[Records]:
        return [list(records) for records in zip(*(notes for _, notes in self._apart), strict=True)]

    def _finding(self, number: int, notes: Records) -> Finding:
        """The replicas differ since the sampled step `number`."""
        offenders, differ = _split(differing(notes, "params"))
        by = f"communication hook `{self._hook}`" if self._hook else self._reducer
        equal_in, before = self._equal or (None, notes)
        since = "since the first step"
        if equal_in is not None:
            since = f"equal in step {equal_in}, different in step {number}"
        if equal_in is None and not (differing(notes, "grads") and not by):
            cause = _FROM_THE_START
        else:
            cause = _cause([before, notes], by, offenders)
        return Finding("drift", "parameters", number, offenders, f"The replicas differ. {differ} ({since}). {cause}")


def state_of(
    optimizer: torch.optim.Optimizer, params: NamedParams
) -> Iterable[tuple[str, torch.Tensor | None]]:
    """The tensors in the optimizer's state, by name."""
    for name, param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.device == param.device:
                yield f"{key} of {name}", value


def common_names(records: Records) -> list[str]:
    """The parameters that two ranks at least have."""
    counts = Counter(name for record in records for name in record["params"])
    return [name for name, number in counts.items() if number > 1]


def differing(records: Records, key: str) -> dict[str, tuple[Any, ...]]:
    """By name, each rank's values of those names that all ranks have, where the values differ.

    `None` is the value of a rank that has no parameter of this name, which other ranks share.
    """
    names = dict.fromkeys(name for record in records for name in record[key])
    found = {name: tuple(record[key].get(name) for record in records) for name in names}
    return {name: values for name, values in found.items() if len({*values} - {None}) > 1}


_FROM_THE_START = (
    "Weights were loaded or changed on one rank after the module was wrapped, or were never equal "
    "(`init_sync=False`): load them on all ranks or before wrapping, or call `ddp.synchronize()` after it."
)


def _split(found: Mapping[str, tuple[Any, ...]]) -> tuple[tuple[int, ...], str]:
    """The offenders and their difference: the ranks that differ from most ranks, or all ranks."""
    groups = list(by_value(dict(enumerate(zip(*found.values(), strict=True)))).values())
    listed, everyone = names(sorted(found)), tuple(range(sum(map(len, groups))))
    if len(groups[0]) > len(everyone) / 2:
        others = tuple(rank for rank in everyone if rank not in groups[0])
        return others, f"{subject(others, 'has', 'have')} other values of {listed} than {ranks(groups[0])}"
    parts = joined([ranks(group) for group in groups]).capitalize()
    return everyone, f"{parts} have different values of {listed}"


def _cause(steps: Sequence[Records], by: str, offenders: Sequence[int]) -> str:
    """The most probable cause. In the first of two `steps` all parameters were equal. `by`: what averages."""
    if unequal := {name for records in steps for name in differing(records, "grads")}:
        if not by:
            return (
                f"The gradients were different already when the optimizer stepped, those of {names(sorted(unequal))}"
                f": they are not averaged. Wrap the module in DistributedDataParallel and call the wrapper, or "
                f"all-reduce each `.grad` before `step()`."
            )
        return (
            f"The averaged gradients were different already: the {by} returns different ones on each rank. Return "
            f"the same on all ranks; if the replicas are meant to differ (local SGD), pass on_drift=None."
        )
    if cause := next(filter(None, map(_hyperparameters, steps)), ""):
        return f"The averaged gradients were equal; {cause}"
    for record in steps[-1]:
        if record["optimizer_steps"] > record["backwards"]:
            return (
                f"An optimizer made {count(record['optimizer_steps'], 'step')} for "
                f"{count(record['backwards'], 'synchronised backward')}: gradients were not averaged. "
                f"{CALL_THE_WRAPPER}"
            )
    if states := differing(steps[0], "state"):
        return (
            f"The averaged gradients were equal, but the optimizer's state differs, such as `{min(states)}`: only one "
            f"rank has loaded a checkpoint, or a rank ran out of inputs under `join`. Load the same on all ranks; "
            f"minddp's wrapper has `ddp.synchronize(optimizer=optimizer)` for it."
        )
    return (
        f"The averaged gradients were equal, and no hyperparameter is known to differ: something has written to "
        f"the parameters or to `.grad` on {ranks(offenders)}, such as `load_state_dict`, or the optimizer's state "
        f"differs (only one rank has loaded a checkpoint, or a rank ran out of inputs under `join`). Do it on all "
        f"ranks, or call `ddp.synchronize(optimizer=optimizer)` after it."
    )


def _hyperparameters(records: Records) -> str:
    """The first hyperparameter that differs; empty if none does."""
    for name, values in differing(records, "hyperparameters").items():
        of_value = by_value(dict(enumerate(values)))
        values_by_rank = ", but ".join(f"{value} on {ranks(of_rank)}" for value, of_rank in of_value.items())
        return f"`{name}` is {values_by_rank}. Set the same on all ranks."
    return ""
