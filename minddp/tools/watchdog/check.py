"""The interface of a guard check: it takes notes on every rank; rank 0 compares them and reports findings.

[Note: sampled steps]
To look closely at every step would cost some percent of it. So checks sample the first `FIRST` steps, in which
most causes show, and then every `EVERY`-th step. `EVERY` shares no divisor with the periods in which scripts log or
save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FIRST = 20  # steps, all of which are sampled
EVERY = 23  # steps, of which one is sampled from then on
ALONE = 20  # optimizer steps without a synchronised backward, after which ranks compare notes all the same
Notes = list[tuple[int, Any]]  # numbered, in rising order


def is_sampled(step: int) -> bool:
    return step % EVERY == 0 or step < FIRST


@dataclass(frozen=True)
class Finding:
    """A problem that `check` has found in `step`, a number of synchronised forwards; `ranks` are the offenders.

    `text` states the fact, the offenders and the remedy. It is reported once for each `check` and `subject`, such
    as a parameter.
    """

    check: str
    subject: str
    step: int
    ranks: tuple[int, ...]
    text: str


class Check:
    """Looks for one kind of problem. A check implements those of these methods that it needs.

    The training thread calls the methods of this table in the given order, in each step. They must be cheap.

    | method | when |
    |---|---|
    | `pre_forward()` | the wrapper is called with grad enabled, before it communicates |
    | `before_module(step, inputs, kwargs)` | before the wrapper runs the module on these inputs |
    | `post_forward(synchronises)` | the module has returned; whether its backward will be reduced |
    | `first_gradient(step)` | the first gradient of a synchronised backward has arrived |
    | `before_unpack()` | all gradients are computed; reductions have not been waited for |
    | `post_backward()` | the averages are in `.grad`, or an exception has ended the backward |
    | `before_step(optimizer)`, `after_step(optimizer)` | around steps on the module's parameters, after backward |

    `communication_hook(name, state)` is called when such a hook is registered. `step` counts synchronised backwards
    and is equal on all ranks.
    """

    def take_notes(self, is_last: bool = False) -> Notes:
        """Called by the guard's thread: the notes since the last call. `is_last`: no further call follows."""
        return []

    def release(self) -> None:
        """Drop all references to parameters, since the wrapper is gone."""

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """Called by the guard's thread on rank 0, once all ranks have noted something of this number."""
        return ()
