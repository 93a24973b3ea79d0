"""What has happened, given the records of all ranks: which parameters, ranks and steps, and the probable cause.

[Note: a record]
A rank's record of a synchronised backward, and of the optimizer's step after it, has fingerprints by name: `prints`
of parameters, one of a `buffer`, and those of the first bytes of canaries: `before` that backward, of their `grads`
after it, and `after` the optimizer, which has these `hyperparameters`. Since the record before, one optimizer made
at most `optimizer_steps`, and `backwards` were synchronised.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from minddp.platform.wording import by_value, count, joined, names, ranks, subject
from minddp.watchdog.check import Finding

Step = Sequence[Mapping[str, Any]]  # the record of each rank; see [Note: a record]


def differences(step: Step) -> dict[str, tuple[int, ...]]:
    """Each rank's fingerprints of what is not the same on all ranks; canaries come first."""
    heads, prints, buffers = (differing(step, what) for what in ("before", "prints", "buffer"))
    return heads | dict(sorted({**prints, **buffers}.items()))


def explain(
    number: int, found: Mapping[str, tuple[int, ...]], steps: Sequence[Step], last: int | None, hook: str | None
) -> Finding:
    """What has happened until step `number`, the last of `steps`. In the first of two, nothing differed.

    All that differs was equal in step `last`, or when wrapped if that is -1. `hook`: the communication hook's name.
    """
    prints_of_rank = dict(enumerate(zip(*found.values(), strict=True)))
    offenders, have_others = _split(list(by_value(prints_of_rank).values()))
    if last is None:
        since, cause = "since the first step", _FROM_THE_START
    else:
        since = f"equal {'when wrapped' if last < 0 else f'in step {last}'}, different in step {number}"
        cause = _cause(steps, hook, offenders)
    text = f"The replicas differ. {have_others.format(names(sorted(found)))} ({since}). {cause}"
    return Finding("drift", "parameters", number, offenders, text)


_FROM_THE_START = (
    "Weights were loaded or changed on one rank after the module was wrapped, or were never equal "
    "(`init_sync=False`): load them on all ranks or before wrapping, or call `ddp.synchronize()` after it."
)
_EQUAL_AGAIN = "Do it on all ranks, or call `ddp.synchronize(optimizer=optimizer)` after it."


def _cause(steps: Sequence[Step], hook: str | None, offenders: Sequence[int]) -> str:
    """The most probable one. All parameters that are looked at were equal in the first of the steps."""
    if any(differing(step, "grads") for step in steps):
        by = f"the communication hook `{hook}` gives" if hook else "the transport has given"
        return (
            f"The gradients were different already after averaging: {by} the ranks different ones. If that is "
            f"meant (local SGD), pass on_drift=None."
        )
    if others := _different_hyperparameters(steps):
        return f"The averaged gradients were equal, but {others}. Set the same on all ranks."
    where = f"on {ranks(offenders)} alone" if len(offenders) == 1 else f"differently on {ranks(offenders)}"
    written = f"has written to the parameters {where}, such as `load_state_dict`"
    if not differing(steps[-1], "before"):
        return f"Others are equal, with their gradients: something {written}, or to their gradients. {_EQUAL_AGAIN}"
    for record in steps[-1]:
        if record["optimizer_steps"] > record["backwards"]:
            return (
                f"An optimizer made {count(record['optimizer_steps'], 'step')} for "
                f"{count(record['backwards'], 'synchronised backward')}: gradients were not averaged. Call the "
                f"wrapper, not `ddp.module` or the bare module, and leave `no_sync` for the last backward before a "
                f"step."
            )
    if any(differing(step, "after") and not differing(step, "before") for step in steps):
        return (
            "The averaged gradients were equal, and the optimizer made different parameters of them: its state "
            "differs (a checkpoint that one rank alone has loaded, or a rank that had run out of inputs under "
            "`join`?), its kernels round differently, or `.grad` was changed after backward. "
            "`ddp.synchronize(optimizer=optimizer)` gives all ranks the state of rank 0."
        )
    if steps[-1][0]["backwards"] > 1:  # see [Note: recorded steps]
        written += ", or to the state of the optimizer"
    equal = "The averaged gradients were equal, and no optimizer is known to differ"
    return f"{equal}: something {written}. {_EQUAL_AGAIN}"


# ------------------------------------------------------------------ what differs


def differing(step: Step, what: str) -> dict[str, tuple[Any, ...]]:
    """Each rank's value of what all ranks have and not all have alike, by name."""
    value_of_name = [record[what] for record in step]
    common = set.intersection(*map(set, value_of_name))
    found = {name: tuple(of_rank[name] for of_rank in value_of_name) for name in sorted(common)}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _split(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], str]:
    """The offenders, and a sentence that says so of `{}`; `groups` begin with the largest."""
    everyone = tuple(sorted(itertools.chain(*groups)))
    if len(groups[0]) > len(everyone) / 2:
        others = tuple(sorted(itertools.chain(*groups[1:])))
        return others, f"{subject(others, 'has', 'have')} other values of {{}} than {ranks(groups[0])}"
    parts = joined([ranks(group) for group in groups]).capitalize()
    return everyone, f"{parts} have different values of {{}}"


def _different_hyperparameters(steps: Sequence[Step]) -> str:
    """`lr of group 0` is 0.1 on ranks 0 and 1, but 0.2 on rank 2."""
    found = {}
    for step in steps:
        for name, values in differing(step, "hyperparameters").items():
            of_value = by_value(dict(enumerate(values)))
            found[name] = f"`{name}` is " + ", but ".join(f"{v} on {ranks(r)}" for v, r in of_value.items())
    return joined(list(found.values())[:3])
