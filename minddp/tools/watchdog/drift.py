"""Are the replicas still equal? Each rank records the sampled steps; rank 0 compares the records and explains.

[Note: a record]
A rank records a synchronised backward and the optimizer's step after it. `params`, fingerprints of the parameters
before that step, are compared. The rest explains a difference: fingerprints of `grads` after averaging, the
optimizer's `hyperparameters`, and since the previous record the steps of one optimizer and the `backwards`.

[Note: replicas that differ on purpose]
With `init_sync=False`, or after the group has changed, ranks may begin with different weights, for instance until
one of them is restored. So nothing is compared in the first `STILL_APART` steps. Post-local SGD lets replicas drift
and averages them from time to time: its communication hook switches this check off. Where it is not known what
averages, replicas have `patience` steps to become equal again; once they did, as many records.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from minddp.platform.wording import by_value, count, joined, names, ranks, subject
from minddp.tools.watchdog.check import Check, Finding, Notes, is_sampled
from minddp.tools.watchdog.fingerprint import Reading
from minddp.tools.watchdog.misuse import CALL_THE_WRAPPER, NamedParams

STILL_APART = 50  # steps
MAX_GROUPS = 8  # of an optimizer, whose hyperparameters are recorded
Records = Sequence[Mapping[str, Any]]  # by rank, of one step; see [Note: a record]


class DriftCheck(Check):
    """`params` are on one device. `starts_equal`: the replicas were made equal at construction.

    With `patience` it is not known what averages the gradients.
    """

    def __init__(self, params: NamedParams, *, starts_equal: bool, patience: int = 0):
        # Of this rank: its records.
        self._params = params
        self._current: dict[str, Any] | None = None  # the record of this step, if it is sampled
        self._awaits_step = False  # the current record gets the parameters as the optimizer finds them
        self._has_optimizer = False
        self._new: deque[tuple[int, dict[str, Any]]] = deque()
        self._recorded = 0  # the latest recorded step
        self._optimizer_steps: Counter[int] = Counter()  # since the latest record, by id of the optimizer
        # Of rank 0: what it knows from comparing.
        self._starts_equal, self._patience = starts_equal, patience
        self._reducer = "" if patience else "transport"  # what averages; a communication hook, once there is one
        self._equal: tuple[int, Records] | None = None  # the latest step, if it was compared
        self._apart: list[tuple[int, Records]] = []  # those since in which replicas differed
        self._has_met_again = False
        self._is_over = False

    def communication_hook(self, name: str, state: Any) -> None:
        """See [Note: replicas that differ on purpose]."""
        self._reducer = f"communication hook `{name}`"
        if type(state).__name__ == "PostLocalSGDState":
            self._is_over = True

    def first_gradient(self, step: int) -> None:
        if self._current is not None and self._has_optimizer:
            self._read_params()  # if no step came
        if self._current is not None and self._new[-1][0] == step:  # the last backward was dropped
            self._current["params"], self._awaits_step = Reading(self._params), True
            return
        self._current = None
        if is_sampled(step):
            self._awaits_step = True
            self._current = {
                "params": Reading(() if self._has_optimizer else self._params),
                "grads": Reading(),
                "hyperparameters": {},
                "optimizer_steps": max(self._optimizer_steps.values(), default=0),
                "backwards": step - self._recorded,
            }
            self._new.append((step, self._current))
            self._recorded = step
            self._optimizer_steps.clear()

    def post_backward(self) -> None:
        if self._current is not None:
            self._current["grads"] = Reading((name, param.grad) for name, param in self._params)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_optimizer = True
        self._read_params()  # not in backward: a script may have changed them for the time of it, as SAM does

    def _read_params(self) -> None:
        if self._current is not None and self._awaits_step:
            self._current["params"], self._awaits_step = Reading(self._params), False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_steps[id(optimizer)] += 1
        if self._current is not None:
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
            read = {key: record[key].prints() for key in ("params", "grads")}
            notes.append((step, record | read))
        return notes

    def release(self) -> None:
        self._params = ()

    def compare(self, number: int, notes: Records) -> Iterable[Finding]:
        """See [Note: replicas that differ on purpose]."""
        if self._is_over or not (self._starts_equal or number >= STILL_APART):
            return
        found = differing(notes, "params")
        if not found or (self._patience and self._meets_again(notes)):
            self._has_met_again |= bool(self._apart)
            self._apart = []
            if not found:
                before, self._equal = self._equal, (number, notes)
                if before and all(differing(records, "hyperparameters") for records in (before[1], notes)):
                    everyone = tuple(range(len(notes)))  # each steps a part: nothing else shows it
                    yield Finding("drift", "parts", number, everyone, _cause([notes], self._reducer, everyone))
            return
        self._apart.append((number, notes))
        since, records = self._apart[0]
        if number - since < self._patience or (self._has_met_again and len(self._apart) < self._patience):
            return
        self._is_over = True
        offenders, differ = _split(differing(records, "params"))
        if self._equal is not None:
            when = f"equal in step {self._equal[0]}, different in step {since}"
            cause = _cause([self._equal[1], records], self._reducer, offenders)
        else:
            when = "since the first step"
            cause = _FROM_THE_START
            if not self._reducer and differing(records, "grads"):
                cause = _cause([records], self._reducer, offenders)
        yield Finding("drift", "parameters", since, offenders, f"The replicas differ. {differ} ({when}). {cause}")

    def _meets_again(self, notes: Records) -> bool:
        """The replicas have had common values since they parted, perhaps after different numbers of steps."""
        of_rank = zip(*(records for _, records in [*self._apart, (0, notes)]), strict=True)
        values = [{tuple(record["params"].items()) for record in records} for records in of_rank]
        return bool(set.intersection(*values))


def differing(records: Records, key: str) -> dict[str, tuple[Any, ...]]:
    """By name, each rank's value, where values differ; `None` of a rank without it, such as another shard's."""
    listed = dict.fromkeys(name for record in records for name in record[key])
    found = {name: tuple(record[key].get(name) for record in records) for name in listed}
    return {name: values for name, values in found.items() if len({*values} - {None}) > 1}


_FROM_THE_START = (
    "Weights were loaded or changed on one rank after the module was wrapped, or were never equal "
    "(`init_sync=False`): load them on all ranks or before wrapping; minddp's wrapper has `ddp.synchronize()` for "
    "it."
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
    unequal = {name for records in steps for name in differing(records, "grads")}
    if unequal and not by:
        return (
            f"The gradients of {names(sorted(unequal))} differed when the optimizer stepped: they are not averaged."
            f" Wrap the module in DistributedDataParallel and call the wrapper, or all-reduce each `.grad` before."
        )
    if unequal:
        return (
            f"The averaged gradients were different already: the {by} returns different ones on each rank. Return "
            f"the same on all ranks; if the replicas are meant to differ (local SGD), pass on_drift=None."
        )
    for records in steps:
        for name, values in differing(records, "hyperparameters").items():
            of_value = by_value(dict(enumerate(values)))
            values_by_rank = ", but ".join(f"{value} on {ranks(of_rank)}" for value, of_rank in of_value.items())
            return f"The averaged gradients were equal; `{name}` is {values_by_rank}. Set the same on all ranks."
    for record in steps[-1]:
        if record["optimizer_steps"] > record["backwards"]:
            return (
                f"An optimizer made {count(record['optimizer_steps'], 'step')} for "
                f"{count(record['backwards'], 'synchronised backward')}: gradients were not averaged. "
                f"{CALL_THE_WRAPPER}"
            )
    return (
        f"The averaged gradients were equal, and no hyperparameter is known to differ: something has written to "
        f"the parameters or to `.grad` on {ranks(offenders)}, such as `load_state_dict`, or the optimizer's state "
        f"differs (only one rank has loaded a checkpoint, or a rank ran out of inputs under `join`). Do it on all "
        f"ranks; minddp's wrapper has `ddp.synchronize(optimizer=optimizer)` for it."
    )
