"""Recorded steps: made here, kept in `recorded/`, and read again for pictures, tables and figures.

Of each recording the typical step is kept, the one of median length.
`machine.json` describes the machine.

[Note: what a recording has to show]
Times differ from run to run, and the pages make claims about them, for instance that a bucket is hidden. Each claim
is an entry of `CLAIMS`. A new recording that contradicts one of them is refused: either the machine was busy, or
the page is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import ladder as recorder
from benchmarks.launch import run_ranks
from benchmarks.machine import describe
from docs.learning import collectives
from docs.learning.ladder import Config
from docs.learning.small_net import FOLLOWED
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.recording import RankRecording, Recording
from minddp.tools.xray.result import Result
from minddp.tools.xray.timeline import Activity, RecordedStep
from reference.bucketed import MIB

FOLDER = Path(__file__).parent / "recorded"
MACHINE = FOLDER / "machine.json"
LADDER = FOLDER / "ladder.json"
PICTURES = ("naive", "flat", "overlapped", "bucketed", "minddp")
NAMES = {"torch's DDP": "torch"}  # of a recording, where its title is not one word


@dataclass(frozen=True)
class Claim:
    """A statement of a page about times; `holds(steps)` is true if a recording shows it."""

    sentence: str
    holds: Callable[[dict[str, RecordedStep]], bool]


def spent_ns(step: RecordedStep, *activities: Activity) -> float:
    """The mean over the ranks."""
    return statistics.mean(sum(rank.parts_ns[activity] for activity in activities) for rank in step.ranks)


def exposed_ns(step: RecordedStep) -> float:
    return spent_ns(step, Activity.EXPOSED)


def length_ns(step: RecordedStep) -> float:
    return spent_ns(step, *Activity)


def hidden(step: RecordedStep) -> float:
    """The share of the communication that runs while the ranks compute, as a mean over the ranks."""
    return statistics.mean(step.overlap(rank) for rank in step.ranks)


CLAIMS = (
    Claim(
        "naive: nothing is hidden, and more than a third of the step is spent waiting",
        lambda s: hidden(s["naive"]) == 0 and exposed_ns(s["naive"]) > length_ns(s["naive"]) / 3,
    ),
    Claim(
        "naive: the six small messages take about as long as the four weights",
        lambda s: 0.5 < times_on_the_wire(s["naive"])[1] / times_on_the_wire(s["naive"])[0] < 2,
    ),
    Claim(
        "flat: nothing is hidden; the wait for one message is shorter than for ten, and its copies take less time "
        "than naive's six small messages",
        lambda s: (
            hidden(s["flat"]) == 0
            and exposed_ns(s["flat"]) < exposed_ns(s["naive"])
            and sum(copies_of_flat(s["flat"])) < times_on_the_wire(s["naive"])[1]
        ),
    ),
    Claim(
        "overlapped: part of the communication is hidden, and less of it than bucketed hides",
        lambda s: 0.1 < hidden(s["overlapped"]) < hidden(s["bucketed"]),
    ),
    Claim(
        "bucketed: most of the communication is hidden; the ranks wait less than under flat and overlapped, and "
        "mostly for the last bucket; a step is shorter than naive's",
        lambda s: (
            hidden(s["bucketed"]) > 0.5
            and exposed_ns(s["bucketed"]) < min(exposed_ns(s["flat"]), exposed_ns(s["overlapped"]))
            and length_ns(s["bucketed"]) < length_ns(s["naive"])
            and waits_most_for_the_last(s["bucketed"])
        ),
    ),
    Claim(
        "backward itself takes longer where communication runs beside it",
        lambda s: spent_ns(s["bucketed"], Activity.BACKWARD) > spent_ns(s["flat"], Activity.BACKWARD),
    ),
    Claim(
        f"minddp: the bucket of {FOLLOWED} begins to move during backward; the last one is waited for longest",
        lambda s: followed_bucket_moves_in_backward(s["minddp"]) and waits_most_for_the_last(s["minddp"]),
    ),
)


def waits_most_for_the_last(step: RecordedStep) -> bool:
    awaited_ns = [sum(rank.buckets[b.index].awaited_ns for rank in step.ranks) for b in step.ranks[0].buckets]
    return awaited_ns[-1] == max(awaited_ns)


def followed_bucket_moves_in_backward(step: RecordedStep) -> bool:
    rank = step.ranks[0]
    wire, complete_ns = step.on_the_wire(2, rank), rank.gradients_complete_ns
    return wire is not None and complete_ns is not None and wire.begin_ns < complete_ns


# ------------------------------------------------------------------ making


def record() -> None:
    """Record every rung and minddp, keep their typical steps, and draw them.

    Raises:
        RuntimeError: see [Note: what a recording has to show].
    """
    config = Config()
    recordings = run_ranks(recordings_of_all, config, world_size=2, threads=1, timeout_s=config.timeout_s)[0]
    kept = [Result(recording) for recording in recordings]
    not_shown = [claim.sentence for claim in CLAIMS if not claim.holds(steps_by_name(kept))]
    if not_shown:
        raise RuntimeError(
            f"This recording does not show what the pages say: {'; '.join(not_shown)}. Not kept. Record again "
            f"on an idle machine, or change the pages."
        )
    FOLDER.mkdir(exist_ok=True)
    LADDER.write_text(json.dumps([result.recording.to_dict() for result in kept], separators=(",", ":")))
    results.cache_clear()
    MACHINE.write_text(json.dumps(describe(), indent=1) + "\n")
    draw()


def recordings_of_all(rank: int, config: Config) -> list[Recording]:
    results = recorder.results_of_all(rank, config)
    return [typical_step_of(result.recording) for result in results] if rank == 0 else []


def typical_step_of(recording: Recording) -> Recording:
    """The typical step alone, on a clock that begins with it, without the machine's name."""
    analysis = Analysis(recording)
    step = analysis.typical
    of_rank = {rank.rank: rank.interval for rank in step.ranks}

    def cut(rank: RankRecording) -> RankRecording:
        begin_ns, end_ns = of_rank[rank.rank]
        return dataclasses.replace(
            rank,
            host="one machine",
            events=tuple(
                event._replace(t_ns=event.t_ns - step.begin_ns)
                for event in rank.events
                if begin_ns <= event.t_ns < end_ns
            ),
            stopped_ns=end_ns - step.begin_ns,
            first_step=step.number,
        )

    ranks = tuple(cut(rank) for rank in recording.ranks)
    note = f"The step of median length among {len(analysis.steps)}."
    return dataclasses.replace(recording, ranks=ranks, notes=(*recording.notes, note))


def draw() -> None:
    """Draw each step that has a chapter, all of them on one scale, and the costs of collectives."""
    from benchmarks.picture import save_picture

    wanted = [result for result in results() if name_of(result) in PICTURES]
    for result in wanted:
        save_picture([result], FOLDER.parent / "pictures" / f"{name_of(result)}.png")
    save_picture(wanted, FOLDER.parent / "pictures" / "all.png")
    collectives.draw(FOLDER.parent / "pictures" / "collectives.png")


# ------------------------------------------------------------------ reading


@cache
def results() -> tuple[Result, ...]:
    return tuple(Result(Recording.from_dict(recording)) for recording in json.loads(LADDER.read_text()))


def name_of(result: Result) -> str:
    title = result.recording.title
    return NAMES.get(title, title)


def steps_by_name(results: list[Result] | tuple[Result, ...]) -> dict[str, RecordedStep]:
    return {name_of(result): result.analysis.typical for result in results}


def steps() -> dict[str, RecordedStep]:
    return steps_by_name(results())


def machine() -> str:
    """The machine that recorded the steps, in a line."""
    described = json.loads(MACHINE.read_text())
    return (
        f"{described['cpu']}, {described['cores']} cores, {described['os'].split()[0]}, Python "
        f"{described['python']}, torch {described['torch']}"
    )


def figures(name: str) -> str:
    """The times of a recorded step, as means over the ranks."""
    step = steps()[name]
    parts = [
        f"A step takes {words.ms(length_ns(step))}",
        f"backward {words.ms(spent_ns(step, Activity.BACKWARD))}",
        f"exposed communication {words.ms(exposed_ns(step))}",
        f"{hidden(step):.0%} of the communication is hidden",
    ]
    if name == "naive":
        large, small = map(words.ms, times_on_the_wire(step))
        parts.append(f"the four weights are on the wire for {large}, the six small gradients for {small}")
    if name == "flat":
        pack, unpack = map(words.ms, copies_of_flat(step))
        parts.append(f"`pack` takes {pack}, `unpack` {unpack}")
    return "; ".join(parts) + "."


def copies_of_flat(step: RecordedStep) -> tuple[float, float]:
    """Times to copy the gradients into the message and out of it: nanoseconds, means over the ranks."""
    packs = [(rank.buckets[0].launched_ns or 0) - (rank.gradients_complete_ns or 0) for rank in step.ranks]
    return statistics.mean(packs), spent_ns(step, Activity.COPY_BACK)


def times_on_the_wire(step: RecordedStep) -> tuple[float, float]:
    """Sums over the messages of 1 MiB and more, and over the smaller ones: nanoseconds, means over the ranks."""
    large, small = 0.0, 0.0
    for rank in step.ranks:
        for bucket in rank.buckets:
            wire = step.on_the_wire(bucket.index, rank)
            assert wire is not None, "only steps that are complete are kept"
            if bucket.nbytes >= MIB:
                large += wire.length_ns / len(step.ranks)
            else:
                small += wire.length_ns / len(step.ranks)
    return large, small


def table() -> str:
    """All recorded steps side by side, as means over the ranks."""
    shown = {"forward": (Activity.FORWARD,), "backward": (Activity.BACKWARD,), "blocked": (Activity.EXPOSED,)}
    rest = tuple(a for a in Activity if all(a not in activities for activities in shown.values()))
    rows = [f"{'milliseconds':12}" + "".join(f"{part:>13}" for part in (*shown, "rest", "a step", "hidden"))]
    for name, step in steps().items():
        columns = [spent_ns(step, *activities) for activities in (*shown.values(), rest)]
        cells = "".join(f"{ns / 1e6:13.1f}" for ns in (*columns, length_ns(step)))
        rows.append(f"{name:12}{cells}{hidden(step):>13.0%}")
    return "\n".join(rows)
