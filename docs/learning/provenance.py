"""Provenance: gradients that record where they come from.

    python -m docs.learning.provenance

A correct average and a wrong one are both just numbers. So let a gradient be a *symbol* instead: a counter
of the sources in it, each source being one backward (rank and micro-batch) through one parameter. Symbols
add and divide as gradients do. Run any scheme of reduction over them, and the result shows directly whether
each rank and each micro-batch is in every rank's result, exactly once, with weight 1/n. (That gradients can
be such symbols is an idea from the exercises at github.com/srush/LLM-Training-Puzzles.)

Each scheme below is a few lines: the correct ones are the rungs of the ladder, the ring, and accumulation
under `no_sync`; the others are the classic bugs. One of them is instructive for *not* being one: an average
of gradients that have been averaged already changes nothing, so averaging after every micro-batch is correct,
only wasteful. With a sum in place of the average the first micro-batch would count n-fold.

Symbols run through the arithmetic of a scheme, not through torch. tests/docs/test_provenance.py carries the
same idea into real gradients of the real rungs: there each source is a digit of its own in a float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from reference.ring import ring_all_reduce


class Source(NamedTuple):
    """One contribution: the gradient of `parameter` in one rank's backward over one micro-batch."""

    rank: int
    batch: int
    parameter: str

    def __str__(self) -> str:
        return f"rank {self.rank}'s batch {self.batch} of `{self.parameter}`"


@dataclass(frozen=True)
class Symbol:
    """A gradient known by what is in it: a counter whose counts may be fractions, since a mean divides."""

    counts: dict[Source, Fraction] = field(default_factory=dict)

    def __add__(self, other: Symbol) -> Symbol:
        total = dict(self.counts)
        for source, count in other.counts.items():
            total[source] = total.get(source, Fraction(0)) + count
        return Symbol(total)

    def __truediv__(self, divisor: int) -> Symbol:
        return Symbol({source: count / divisor for source, count in self.counts.items()})


def summed(symbols: Iterable[Symbol]) -> Symbol:
    return sum(symbols, start=Symbol())


Launch = tuple[str, ...]  # the parameters whose gradients one message carries, in the order they are packed


class Replica:
    """One rank: no weights, only `grad[parameter]`."""

    def __init__(self, rank: int, parameters: Sequence[str]):
        self.rank = rank
        self.grad = {name: Symbol() for name in parameters}

    def backward(self, batch: int) -> None:
        """Add this micro-batch's gradient to every parameter's `grad`, as autograd does."""
        for name in self.grad:
            self.grad[name] += Symbol({Source(self.rank, batch, name): Fraction(1)})

    def divide(self, divisor: int) -> None:
        for name in self.grad:
            self.grad[name] /= divisor


def all_reduce_sum(replicas: Sequence[Replica], launches: Sequence[Sequence[Launch]]) -> None:
    """Sum over `replicas`; `launches[i]` are the messages of `replicas[i]`, in its order.

    As on a real wire the k-th message of one rank meets the k-th of every other, and within it the j-th slot
    the j-th slot, *whatever they hold*. `ValueError` where a real wire would hang.
    """
    for kth_launches in zip(*launches, strict=True):
        for names in zip(*kth_launches, strict=True):
            total = summed(replica.grad[name] for replica, name in zip(replicas, names, strict=True))
            for replica, name in zip(replicas, names, strict=True):
                replica.grad[name] = total


def average(replicas: Sequence[Replica], plan: Sequence[Launch]) -> None:
    """The correct step: divide, then sum with one plan for all."""
    for replica in replicas:
        replica.divide(len(replicas))
    all_reduce_sum(replicas, [plan] * len(replicas))


def violations(replicas: Sequence[Replica], batches: int) -> list[str]:
    """A sentence for each thing wrong with each replica's gradients; none means they are proven correct.

    Correct: on every rank each parameter's gradient holds every rank's every batch with weight 1/n, and
    nothing else.
    """
    share = Fraction(1, len(replicas))
    sentences = []
    for replica in replicas:
        for name, symbol in replica.grad.items():
            wanted = {Source(rank, batch, name) for rank in range(len(replicas)) for batch in range(batches)}
            for source in sorted(wanted | symbol.counts.keys()):
                count = symbol.counts.get(source, Fraction(0))
                expected = share if source in wanted else Fraction(0)
                if count != expected:
                    where = f"rank {replica.rank}, `{name}`"
                    sentences.append(f"{where}: {source} has weight {count}, not {expected}")
    return sentences


# --- the schemes: each runs backward over all micro-batches on all replicas, and reduces in its own way ---

Scheme = Callable[[Sequence[Replica], int], None]


def accumulate(replicas: Sequence[Replica], batches: Iterable[int]) -> None:
    for batch in batches:
        for replica in replicas:
            replica.backward(batch)


def one_message_each(replicas: Sequence[Replica]) -> list[Launch]:
    return [(name,) for name in replicas[0].grad]


def naive(replicas: Sequence[Replica], batches: int) -> None:
    """A message per parameter, after all micro-batches."""
    accumulate(replicas, range(batches))
    average(replicas, one_message_each(replicas))


def flat(replicas: Sequence[Replica], batches: int) -> None:
    """One message for all parameters."""
    accumulate(replicas, range(batches))
    average(replicas, [tuple(replicas[0].grad)])


def bucketed(replicas: Sequence[Replica], batches: int) -> None:
    """Two buckets in reverse registration order; no_sync for all micro-batches but the last."""
    accumulate(replicas, range(batches))
    names = tuple(reversed(replicas[0].grad))
    half = len(names) // 2
    average(replicas, [names[:half], names[half:]])


def ring(replicas: Sequence[Replica], batches: int) -> None:
    """The sum taken by `ring.py`, a message per chunk and step."""
    accumulate(replicas, range(batches))
    for replica in replicas:
        replica.divide(len(replicas))
    buffers = [np.array([*replica.grad.values()], dtype=object) for replica in replicas]
    for replica, result in zip(replicas, ring_all_reduce(buffers).results, strict=True):
        replica.grad = dict(zip(replica.grad, result, strict=True))


def average_every_micro_batch(replicas: Sequence[Replica], batches: int) -> None:
    """No no_sync at all: correct, since an average of averages is the average, but expensive."""
    for batch in range(batches):
        accumulate(replicas, [batch])
        average(replicas, one_message_each(replicas))


def sum_every_micro_batch(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: sums what was summed before, and divides once at the end."""
    for batch in range(batches):
        accumulate(replicas, [batch])
        all_reduce_sum(replicas, [one_message_each(replicas)] * len(replicas))
    for replica in replicas:
        replica.divide(len(replicas))


def reduce_twice(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: a parameter lies in two buckets (or its hook fires twice) and is summed in both."""
    accumulate(replicas, range(batches))
    plan = one_message_each(replicas)
    average(replicas, [*plan, plan[0]])


def forget_a_rank(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: the last rank is not in the process group."""
    accumulate(replicas, range(batches))
    average(replicas[:-1], one_message_each(replicas))


def forget_a_bucket(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: the last bucket is never launched, and the optimizer takes the local gradients in it."""
    accumulate(replicas, range(batches))
    average(replicas, one_message_each(replicas)[:-1])


def forget_the_division(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: a sum, where a mean was promised; the learning rate is n times the intended one."""
    accumulate(replicas, range(batches))
    all_reduce_sum(replicas, [one_message_each(replicas)] * len(replicas))


def average_the_last_backward_only(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: reduces what the last backward added, before it is added to what no_sync accumulated."""
    accumulate(replicas, range(batches - 1))
    fresh = [Replica(replica.rank, [*replica.grad]) for replica in replicas]
    accumulate(fresh, [batches - 1])
    average(fresh, one_message_each(fresh))
    for replica, addition in zip(replicas, fresh, strict=True):
        replica.grad = {name: symbol + addition.grad[name] for name, symbol in replica.grad.items()}


def launch_in_readiness_order(replicas: Sequence[Replica], batches: int) -> None:
    """Bug: each rank launches what is ready first, and the last rank ran its layers the other way round."""
    accumulate(replicas, range(batches))
    for replica in replicas:
        replica.divide(len(replicas))
    plan = one_message_each(replicas)
    all_reduce_sum(replicas, [plan] * (len(replicas) - 1) + [plan[::-1]])


CORRECT: tuple[Scheme, ...] = (naive, flat, bucketed, ring, average_every_micro_batch)
BUGS: tuple[Scheme, ...] = (
    sum_every_micro_batch,
    reduce_twice,
    forget_a_rank,
    forget_a_bucket,
    forget_the_division,
    average_the_last_backward_only,
    launch_in_readiness_order,
)


def run_scheme(scheme: Scheme, ranks: int, batches: int, parameters: Sequence[str]) -> list[str]:
    """The `violations` of one scheme."""
    replicas = [Replica(rank, parameters) for rank in range(ranks)]
    scheme(replicas, batches)
    return violations(replicas, batches)


def main() -> None:
    """Print the verdict on each scheme on 3 ranks with 2 micro-batches."""
    name_column = Column("scheme", overflow="fold")
    table = Table(name_column, "what it does", "verdict", "the first of its faults", show_lines=True)
    for scheme in (*CORRECT, *BUGS):
        found = run_scheme(scheme, ranks=3, batches=2, parameters=("w1", "b1", "w2", "b2"))
        verdict = f"[red]{len(found)} faults[/red]" if found else "[green]proven[/green]"
        summary = (scheme.__doc__ or "").strip()
        table.add_row(scheme.__name__, summary, verdict, found[0] if found else "")
    Console().print(table)


if __name__ == "__main__":
    main()
