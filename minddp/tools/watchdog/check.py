"""What one check of the guard sees of training, notes on each rank, and finds on rank 0; and how that is told.

[Note: steps that are looked at]
To look at each step would cost percents of it. So the guard looks at the first `FIRST`, when most causes show, and
then at each `EVERY`-th, a number that is no divisor of the periods in which scripts log or save. A step begins
when the backward of the one before is over, and ends with what optimizers do after its own. In other steps no check
is called, unless optimizers step without synchronised backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FIRST = 20  # steps, each of which is looked at
EVERY = 23  # steps, of later ones
ALONE = 20  # optimizer steps without a synchronised backward, after which notes are exchanged all the same
Notes = list[tuple[int, Any]]  # numbered, and in rising order


def is_looked_at(step: int) -> bool:
    return step % EVERY == 0 or step < FIRST


def looked_at_before(step: int) -> int:
    """How many steps before this one are."""
    return step if step < FIRST else FIRST + (step - 1) // EVERY - (FIRST - 1) // EVERY


class ReplicasDrift(RuntimeError):
    """With `on_drift="raise"`: training has gone wrong without an error of its own; the message says how."""


@dataclass(frozen=True)
class Finding:
    """One trouble. `check` found it in `step`, a number of synchronised forwards; `ranks` are the offenders.

    `text` states the fact, the offenders and the remedy, once for each `check` and `subject`, such as a parameter.
    `is_fatal`: the result of the training is wrong, not only slow; then it is raised in the first forward from
    `raises_in_step` on, the same on all ranks, as one that raised earlier would leave others waiting.
    """

    check: str
    subject: str
    step: int
    ranks: tuple[int, ...]
    text: str
    is_fatal: bool = True
    raises_in_step: int = 0


class Check:
    """Looks for one kind of trouble, by those of these methods that it has.

    The thread that trains calls the first ones, in this order in each step that is looked at. They must be cheap:

    | method | when |
    |---|---|
    | `step_begins()` | the backward of the step before is over, which was not looked at |
    | `forward_begins()` | the wrapper is called, with gradients; it has not communicated yet, as for buffers |
    | `buffers_synchronised(step, buffers)` | all ranks have just been given these buffers of one of them, by name |
    | `before_forward(step, inputs, kwargs)` | the wrapper is about to run the module on these inputs |
    | `after_forward(synchronises)` | the module has returned; its backward will be reduced, or will not |
    | `backward_begins(step, optimizer_steps)` | the first gradient of a synchronised backward has arrived, on all \
ranks; one optimizer made at most so many steps since the last call |
    | `backward_computed()` | the engine has computed all gradients; reductions have not been waited for |
    | `backward_over()` | the averages are in the gradients, or an exception has ended the backward |
    | `optimizer_begins(optimizer)`, `optimizer_over(optimizer)` | around steps on the module's parameters |

    `communication_hook(name, state)` is called in any step, when such a hook is registered. `step` counts
    synchronised backwards, which are the same on all ranks.
    """

    def take_notes(self, is_last: bool = False) -> Notes:
        """Those since the last call, by the guard's thread. `is_last`: the wrapper is gone, or the process ends."""
        return []

    def let_go(self) -> None:
        """The wrapper is gone, and its parameters must be free at once: refer to none of them from now on."""

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """All ranks have noted something of this number: `notes[rank]`. Called on rank 0 by the guard's thread."""
        return ()
