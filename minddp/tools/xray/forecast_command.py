"""`minddp forecast`: how long a step takes on other numbers of ranks and hosts, from a recording.

minddp forecast runs/xray/step.json --ranks 2 4 8 16 --hosts 1 1 1 2 --rate 10
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from minddp.options import BucketCaps
from minddp.platform import wording
from minddp.tools.forecast.link import FREE, Link, all_reduce, hop_of
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.forecast.step_model import Job
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.result import load
from minddp.tools.xray.timeline import Activity

GBIT = 1e9 / 8
COLUMNS = ["ranks", "hosts", "buckets", "ideal ms", "predicted ms", "exposed", "efficiency"]


def main(arguments: Sequence[str]) -> int:
    """Run `minddp forecast` with these arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="minddp forecast", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("recording", type=Path, help="step.json of `minddp xray`")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(%(default)s)")
    add("--hosts", type=int, nargs="+", default=[1], help="for all numbers of ranks, or for each (1)")
    add("--rate", type=positive, metavar="GBIT", help="Gbit/s of a host's network interface, in each direction")
    add("--latency", type=positive, metavar="US", help="microseconds of a hop between hosts (as inside)")
    add("--bucket-mb", help='of each bucket, in MiB, or "auto" (as recorded)')
    options = parser.parse_args(arguments)
    try:
        rows = list(rows_of(options))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(wording.table([COLUMNS, *rows], ">" * len(COLUMNS)))
    return 0


def positive(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def rows_of(options: argparse.Namespace) -> Iterator[list[str]]:
    """A forecast for each number of ranks, as cells of the `COLUMNS`.

    Raises:
        ValueError: the recording does not show the costs, or --hosts or --rate do not fit.
    """
    job, inside = job_of_recording(load(options.recording).analysis)
    hosts = options.hosts * len(options.ranks) if len(options.hosts) == 1 else options.hosts
    if len(hosts) != len(options.ranks):
        raise ValueError(f"--hosts has {len(hosts)} numbers, --ranks {len(options.ranks)}: give one, or as many.")
    if max(hosts) > 1 and options.rate is None:
        raise ValueError("Pass --rate, that of a host's network interface.")
    latency_s = inside.latency_s if options.latency is None else options.latency / 1e6
    between = FREE if options.rate is None else Link(latency_s, options.rate * GBIT)
    for ranks, on_hosts in zip(options.ranks, hosts, strict=True):
        link = all_reduce(ranks, on_hosts, inside, between)
        changed = job
        if options.bucket_mb == "auto":
            changed = replace(job, plan=plan_buckets(job.plan.params, job.ready_s, link, job.backward_s))
        elif options.bucket_mb is not None:
            changed = job.with_caps(BucketCaps.from_mib(positive(options.bucket_mb), None).after_rebuild())
        step_s = changed.step_s(link)
        times = (f"{1e3 * seconds:.2f}" for seconds in (job.alone_s, step_s, changed.exposed_s(link)))
        yield [str(ranks), str(on_hosts), str(len(changed.plan.buckets)), *times, f"{job.alone_s / step_s:.1%}"]


def job_of_recording(analysis: Analysis) -> tuple[Job, Link]:
    """The median job of the recorded steps, and a hop, as if messages went round a ring.

    Raises:
        ValueError: no step was recorded, no message was seen to complete, or there was one rank.
    """
    if analysis.costs is None:
        raise ValueError("The recording has no step in which a message was seen to complete.")
    alike = [step for step in analysis.steps if len(step.ranks) == len(analysis.typical.ranks)]
    ranks = [rank for step in alike for rank in step.ranks]
    waits = (Activity.EXPOSED, Activity.COPY_BACK, Activity.BUFFERS)
    alone_s = median(rank.length_ns - sum(rank.parts_ns[activity] for activity in waits) for rank in ranks) / 1e9
    backward_s = median(rank.backward.length_ns for rank in ranks) / 1e9
    ready_s = {
        param: median(
            (rank.ready_ns[param] - rank.backward.begin_ns) / 1e9 if param in rank.ready_ns else backward_s
            for rank in ranks
        )
        for param in range(len(analysis.typical.plan.params))
    }
    job = Job(alone_s, backward_s, ready_s, analysis.typical.plan)
    return job, hop_of(analysis.costs.wire, analysis.recording.world_size)
