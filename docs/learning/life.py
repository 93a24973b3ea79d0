"""One gradient's way through minddp, and the step around it: plans, order of events, one number, its last place."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from docs.learning.small_net import CAP_MIB, FOLLOWED, examples_of, loss_of, small_net
from minddp import DistributedDataParallel
from minddp.core.events import Event, EventKind, EventSink
from minddp.tools.xray import words
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep
from reference.interface import gradient

OF_A_PARAMETER = (EventKind.PARAM_READY,)
FROM_ANOTHER_THREAD = (EventKind.BUCKET_COMPLETED,)  # emitted at any moment, so their order varies
ELEMENT = (3, 5)  # of the gradient that is followed; any will do
LEARNING_RATE = 0.1
COMPLETION_LIMIT_S = 60.0


class Training:
    """The small net under minddp, ready for its next step."""

    def __init__(self, rank: int):
        self.ddp = DistributedDataParallel(small_net(), bucket_cap_mb=CAP_MIB)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=LEARNING_RATE)
        self.examples = examples_of(rank)

    def backward(self) -> None:
        loss_of(self.ddp, self.examples).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def watched_step(self, sink: EventSink = lambda event: None) -> list[Event]:
        """Return the events of a step, and pass them to `sink`, too. Waits for those of other threads."""
        events: list[Event] = []
        for watcher in (events.append, sink):
            self.ddp._reducer.events.watch(watcher)
        self.step()
        deadline = time.monotonic() + COMPLETION_LIMIT_S
        while is_under_way(events):
            if time.monotonic() > deadline:
                raise TimeoutError("A bucket was launched, but its completion was not reported.")
            time.sleep(0.001)
        return events

    def names(self) -> list[str]:
        return [spec.name for spec in self.ddp.plan.params]


def is_under_way(events: Sequence[Event]) -> bool:
    """True if the completion of a launched bucket is not yet among the events."""
    kinds = [event.kind for event in events]
    return kinds.count(EventKind.BUCKET_COMPLETED) < kinds.count(EventKind.BUCKET_LAUNCHED)


def plan(rank: int) -> str:
    """The bucket plan before the first backward, and after it."""
    training = Training(rank)
    guessed = str(training.ddp.plan)
    training.step()
    training.backward()  # its forward rebuilds the buckets
    return f"{guessed}\n\n{training.ddp.plan}"


def first_step(rank: int) -> str:
    """The events of the very first step, in order."""
    return "\n".join(events_of(Training(rank)))


def later_step(rank: int) -> str:
    """The events of every later step, in order."""
    training = Training(rank)
    training.step()
    training.step()
    return "\n".join(events_of(training))


def events_of(training: Training) -> list[str]:
    """The events of the next step, with names."""
    events = training.watched_step()
    names = training.names()
    return [in_words(event, names) for event in events if event.kind not in FROM_ANOTHER_THREAD]


def in_words(event: Event, names: Sequence[str]) -> str:
    about = names[event.subject] if event.kind in OF_A_PARAMETER else str(event.subject)
    return event.kind.value if event.subject < 0 else f"{event.kind.value}: {about}"


def number(rank: int) -> str:
    """One element of one gradient at every stage, on both ranks."""
    training = Training(rank)
    training.step()
    training.step()
    param = training.ddp.get_parameter(f"module.{FOLLOWED}").detach()
    seen: dict[str, float] = {}

    def look(event: Event) -> None:
        is_its_bucket = event.subject == 2  # for events of a bucket
        if event.kind is EventKind.PARAM_READY and training.names()[event.subject] == FOLLOWED:
            seen[".grad when its hook fires"] = gradient_of_followed(training)
        elif event.kind is EventKind.BUCKET_READY and is_its_bucket:
            seen["in bucket 2, packed"] = float(view_of_followed(training)[ELEMENT])
        elif event.kind is EventKind.BUCKET_WAITED and is_its_bucket:
            seen["in bucket 2, reduced"] = float(view_of_followed(training)[ELEMENT])
        elif event.kind is EventKind.BACKWARD_END:
            seen[".grad when backward returns"] = gradient_of_followed(training)

    seen["weight before the step"] = float(param[ELEMENT])
    training.watched_step(look)
    seen["weight after the step"] = float(param[ELEMENT])

    of_rank: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_rank, seen)
    place = ", ".join(map(str, ELEMENT))
    rows = [f"{f'{FOLLOWED}[{place}]':30}" + "".join(f"{f'rank {r}':>14}" for r in range(len(of_rank)))]
    for stage in seen:
        form = "14.6f" if stage.startswith("weight") else "14.2e"
        rows.append(f"{stage:30}" + "".join(f"{values[stage]:{form}}" for values in of_rank))
    return "\n".join(rows)


def gradient_of_followed(training: Training) -> float:
    """The element of it that is followed."""
    return float(gradient(training.ddp.get_parameter(f"module.{FOLLOWED}"))[ELEMENT])


def view_of_followed(training: Training) -> Tensor:
    """Its part of the bucket. Do not keep it: a bucket whose memory is referred to takes new memory."""
    slot = training.ddp.plan.slot_of[training.names().index(FOLLOWED)]
    bucket = training.ddp._reducer.store.all()[slot.bucket]
    return bucket.views[bucket.spec.slots.index(slot)]


def memory(rank: int) -> str:
    """For each parameter, the memory of `.grad` when backward has returned: the bucket's or its own."""
    training = Training(rank)
    training.step()
    training.step()
    training.backward()
    rows = [f"{'parameter':14}  {'bytes':>9}  .grad is afterwards"]
    for bucket in training.ddp._reducer.store.all():
        for name, param, view in zip(bucket.names, bucket.params, bucket.views, strict=True):
            lies_there = gradient(param).data_ptr() == view.data_ptr()
            where = f"memory of bucket {bucket.spec.index}" if lies_there else "memory of its own, copied into"
            rows.append(f"{name:14}  {view.nbytes:9,}  {where}")
    return "\n".join(rows)


# ------------------------------------------------------------------ the recorded step


def sums(step: RecordedStep) -> str:
    """The recorded step by activity, on each rank."""
    rows = [f"{'milliseconds':30}" + "".join(f"{f'rank {rank.rank}':>9}" for rank in step.ranks)]
    for activity in Activity:
        spent = [rank.parts_ns[activity] for rank in step.ranks]
        if any(spent):
            rows.append(row_of_ms(activity.value, spent))
        if activity is Activity.BACKWARD:
            packing = [sum(pack.length_ns for pack in rank.packs) for rank in step.ranks]
            rows.append(row_of_ms("  including packing", packing))
    rows.append(row_of_ms("the step", [rank.length_ns for rank in step.ranks]))
    return "\n".join(rows)


def row_of_ms(what: str, ns_of_rank: Sequence[int]) -> str:
    return f"{what:30}" + "".join(f"{ns / 1e6:9.2f}" for ns in ns_of_rank)


def diary(step: RecordedStep, rank: RankStep) -> str:
    """What happens to the gradient that the pages follow: milliseconds from the beginning of the step."""
    index = [param.name for param in rank.plan.params].index(FOLLOWED)
    bucket = next(b for b in rank.buckets if index in [slot.param for slot in rank.plan.buckets[b.index].slots])
    last, wire = step.last_join(bucket.index), step.on_the_wire(bucket.index, rank)
    packs = [pack for pack in rank.packs if pack.bucket == bucket.index]
    moments = [
        (rank.ready_ns[index], f"its hook fires: {FOLLOWED}.grad is complete"),
        (packs[-1].begin_ns, "packing begins"),
        (packs[-1].end_ns, f"packed and scaled: bucket {bucket.index} is ready"),
        (bucket.launched_ns, f"bucket {bucket.index} is launched here"),
        (last and last[0], f"rank {last and last[1]} has launched it, the last one to do so"),
        (wire and wire.begin_ns, "its bytes begin to move"),
        (bucket.completed_ns, f"the all-reduce is complete, {words.size(bucket.nbytes)}"),
        (rank.gradients_complete_ns, "backward has computed its last gradient, that of layer1.weight"),
        (bucket.waited_ns, f"the wait for bucket {bucket.index} is over"),
        (bucket.unpacked_ns, "the average is in .grad"),
        (next(s.begin_ns for s in rank.spans if s.activity is Activity.OPTIMIZER), "the optimizer begins"),
    ]
    known = sorted((t_ns, place, text) for place, (t_ns, text) in enumerate(moments) if t_ns is not None)
    return "\n".join(f"{(t_ns - rank.interval.begin_ns) / 1e6:7.2f} ms  {text}" for t_ns, _, text in known)
