"""All lessons by name, and how to run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.launch import run_ranks
from docs.learning import above, bits, collectives, ladder, life, mean, recipe, recorded, traps


@dataclass(frozen=True)
class Lesson:
    """`show(rank)` runs on `ranks` ranks; the lesson's output is what it returns on rank 0.

    With `ranks=0` it needs no process group, and is called as rank 0.
    """

    question: str
    show: Callable[[int], str]
    ranks: int = 2


def run(lesson: Lesson) -> str:
    """Start the lesson's ranks and return its output."""
    if not lesson.ranks:
        return lesson.show(0)
    return run_ranks(lesson.show, world_size=lesson.ranks, threads=1, timeout_s=120)[0]


def listing() -> str:
    """All lessons, and the question that each answers."""
    return "\n".join(f"{name:14} {lesson.question}" for name, lesson in LESSONS.items())


def recorded_table(_rank: int) -> str:
    return recorded.table()


def recorded_sums(_rank: int) -> str:
    return life.sums(recorded.steps()["minddp"])


def recorded_diary(_rank: int) -> str:
    step = recorded.steps()["minddp"]
    return life.diary(step, step.ranks[0])


LESSONS = {
    **{
        name: Lesson(f"in which order does {name} compute, send and wait?", partial(ladder.order, name))
        for name in ladder.RUNGS
    },
    "times": Lesson("how long did each rung's step take when it was recorded?", recorded_table, ranks=0),
    "held": Lesson("what do the rungs below and above DDP hold and send?", above.counted, ranks=4),
    "arithmetic": Lesson("how much memory does a model need on each rank?", above.arithmetic, ranks=0),
    "costs": Lesson("how many latencies and bytes does each all-reduce cost?", collectives.costs, ranks=0),
    "fastest": Lesson("which all-reduce is the fastest, and when?", collectives.winners, ranks=0),
    "plan": Lesson("which gradient travels in which bucket?", life.plan),
    "first-step": Lesson("what happens in the very first step?", life.first_step),
    "step": Lesson("what happens in every later step?", life.later_step),
    "sums": Lesson("where did the milliseconds of the recorded step go?", recorded_sums, ranks=0),
    "diary": Lesson("what happened to one gradient in the recorded step, and when?", recorded_diary, ranks=0),
    "number": Lesson("how does one element of one gradient change on its way?", life.number),
    "memory": Lesson("in which memory do the averages end?", life.memory),
    "parameter": Lesson("what if the hook's argument is averaged?", traps.parameter),
    "incoming": Lesson("what if gradients are averaged before they are accumulated?", traps.incoming),
    "readiness": Lesson("what if gradients leave in the order in which they become ready?", traps.readiness),
    "unwaited": Lesson("what if no rank waits?", traps.unwaited),
    "start": Lesson("what if the replicas do not start equal?", traps.start),
    "missing": Lesson("what if a parameter gets no gradient?", traps.missing),
    "micro-batches": Lesson("what does it cost to forget no_sync?", traps.every_micro_batch),
    "sampler": Lesson("what if there is no DistributedSampler?", recipe.sampler),
    "epoch": Lesson("what if set_epoch is forgotten?", recipe.epoch),
    "rate": Lesson("what if the learning rate is not scaled?", recipe.rate),
    "clip": Lesson("what if gradients are clipped before they are averaged?", recipe.clip),
    "means": Lesson("what if the ranks' means are averaged?", recipe.means),
    "saving": Lesson("what if every rank saves?", recipe.saving),
    "tokens": Lesson("what if ranks have unequal numbers of tokens?", recipe.tokens),
    "shares": Lesson("how much does each micro-batch of each rank count?", mean.shares),
    "accumulation": Lesson("what if micro-batches have unequal numbers of tokens?", recipe.accumulation),
    "overflow": Lesson("why is the mean taken before the sum?", bits.overflow, ranks=0),
    "reciprocal": Lesson("is it the same to multiply by 1/n and to divide by n?", bits.reciprocal, ranks=0),
    "order-of-sum": Lesson("does it matter in which order ranks are added up?", bits.order_of_sum, ranks=0),
    "layout-2": Lesson("does the layout of buckets change bits on two ranks?", bits.layout),
    "layout-3": Lesson("does the layout of buckets change bits on three ranks?", bits.layout, ranks=3),
    "ranks": Lesson("does the number of ranks change bits, and can it be helped?", bits.number_of_ranks, ranks=4),
    "same-bits": Lesson("does minddp train to torch's bits?", bits.same_as_torch, ranks=3),
}
