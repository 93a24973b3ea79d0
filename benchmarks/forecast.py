"""Does a step take as long as `minddp.tools.forecast` predicts?

    sudo python -m benchmarks forecast       # 2 to 8 ranks on one host and on two, at three rates; three minutes

The forecast uses measurements of two ranks of one host: a step of each by itself, both at once, and an all-reduce
of the two. The link between hosts has the cable's rate less the headers of frames, and the latency of a hop
inside. Nothing is fitted.

The forecast assumes a core for each rank, but here all ranks share the machine's, less those that other programs
use meanwhile, which is measured. A core moves and adds the bytes, at the rate of a hop inside. If there are more
ranks than cores, all computing and moving takes longer by their ratio; the network does not. Without a spare core
that work delays backward: see [Note: messages take time from backward].
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchmarks.display import console_of, table_of
from benchmarks.harness import gathered
from benchmarks.launch import run_ranks
from benchmarks.namespaces import HOSTS, bytes_per_second, limit_rate, settle, two_hosts
from benchmarks.question import Options, report_of, write
from benchmarks.workloads import Workload, WorkloadName, training_step, workload
from minddp import DistributedDataParallel
from minddp.platform.host import usable_cores
from minddp.tools.forecast.auto_buckets import Observer, observed
from minddp.tools.forecast.gradient_clock import HostClock
from minddp.tools.forecast.link import FREE, Link, all_reduce, hop_of, measure_link
from minddp.tools.forecast.step_model import Job
from minddp.transport import open_transport

WARM_UP_STEPS = 4
GOODPUT = 1448 / 1514  # of a frame's bytes, those that TCP carries
Place = tuple[int, int, str]  # ranks, hosts, the cable's rate
Steps = tuple[np.ndarray, DistributedDataParallel]
Measured = tuple[float, float]  # the median step of the slowest rank, and the cores that others left


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Predict steps on several numbers of ranks and hosts, and measure them."""

    world_size: int = 8
    """The largest number of ranks."""
    ranks: tuple[int, ...] = (2, 4, 6, 8)
    rates: tuple[str, ...] = ("300mbit", "1gbit", "10gbit")
    """Of the cable between two hosts."""
    workload: WorkloadName = "transformer"
    steps: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(ranks % HOSTS or not 0 < ranks <= self.world_size for ranks in (*self.ranks, self.world_size)):
            raise ValueError(f"ranks are {self.ranks}: give even numbers up to world_size, {self.world_size}.")


def main(config: Config) -> None:
    start = partial(
        run_ranks, measure, config, world_size=config.world_size, threads=config.threads, timeout_s=config.timeout_s
    )
    (job, hop, here), *_ = start(1)
    with two_hosts(config.rates[0]) as hosts:
        (_, _, there), *_ = start(HOSTS, settle=partial(settle, hosts, config.world_size // HOSTS))
    rows = predictions(job, hop, here | there)
    columns = {
        "cores": "{cores:.2f}",
        "predicted ms": "{predicted_ms:.1f}",
        "measured ms": "{measured_ms:.1f}",
        "error": "{error:+.1%}",
    }
    table_of(f"{config.workload}: a step by its forecast", "where", columns, rows).show(console_of())
    if (path := config.path("forecast")) is not None:
        write(report_of("steps predicted from two ranks of one host, and measured", config, rows=rows), path)


def measure(rank: int, config: Config, hosts: int) -> tuple[Job | None, Link | None, dict[Place, Measured]]:
    """On one host a job and a hop, of two ranks; the steps at each place. Collective."""
    alone, pair = [dist.new_group([one]) for one in (0, 1)], dist.new_group([0, 1])
    task = workload(config.workload, config.workload_size)
    once = partial(steps_of, rank, task, config.seed, config.steps)
    job, hop = described(once, alone[rank], pair) if rank < 2 and hosts == 1 else (None, None)
    per_host = config.world_size // hosts
    steps_s = {}
    for rate, ranks in itertools.product(config.rates if hosts > 1 else [""], config.ranks):
        if rate and rank % per_host == 0:
            limit_rate(rate)
        members = [one for one in range(config.world_size) if one % per_host < ranks // hosts]
        group, before = dist.new_group(members), used()
        own_s = np.median(once(group)[0]) if rank in members else 0.0
        steps_s[ranks, hosts, rate] = float(max(gathered(own_s))), cores_left(before)
    return job, hop, steps_s


def described(once: Callable[..., Steps], alone: dist.ProcessGroup, pair: dist.ProcessGroup) -> tuple[Job, Link]:
    """The inputs of the forecast. `once` is `steps_of` in a group.

    It runs on two ranks: each is `alone` in one group, and both are in the `pair`.
    """
    clock, cpu = HostClock(), torch.device("cpu")
    observer = Observer(clock)
    steps_s, ddp = once(alone, observer, time.process_time)
    seen = [observed(stamps, clock) for stamps in observer.backwards[WARM_UP_STEPS:]]
    ready_s = {param: float(np.median([one.ready_s[param] for one in seen])) for param in seen[0].ready_s}
    job = Job(float(np.median(steps_s)), float(np.median([one.computed_s for one in seen])), ready_s, ddp.plan)
    before = used()
    link = measure_link(open_transport("process_group", pair, cpu), cpu, clock)
    return job, slower(hop_of(link, 2), 1 / crowding(2, cores_left(before, pair)))


def used() -> tuple[float, float, float]:
    """Seconds: now, those that all cores were busy since the machine started, and those for this process."""
    times = psutil.cpu_times()
    return time.perf_counter(), sum(times) - times.idle - times.iowait, time.process_time()


def cores_left(before: tuple[float, float, float], group: dist.ProcessGroup | None = None) -> float:
    """The cores that other programs than the group's ranks have left since then. Collective."""
    passed_s, busy_s, own_s = (now - then for now, then in zip(used(), before, strict=True))
    own = torch.tensor([own_s], dtype=torch.float64)
    dist.all_reduce(own, group=group)
    return max(0.1, min(usable_cores(), usable_cores() - (busy_s - own.item()) / passed_s))


def steps_of(
    rank: int,
    task: Workload,
    seed: int,
    steps: int,
    group: dist.ProcessGroup,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Steps:
    """Seconds of each step after the first ones, `[steps]`, and the module that took them."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(copy.deepcopy(task.model()), process_group=group, transport="process_group")
    if observer is not None:
        ddp.events.watch(observer)
    step = training_step(ddp, task, rank)
    ends_s = []
    for _ in range(WARM_UP_STEPS + steps + 1):
        step()
        ends_s.append(clock())
    return np.diff(ends_s)[WARM_UP_STEPS:], ddp


def predicted_s(job: Job, hop: Link, wire: Link, ranks: int, hosts: int, cores: float) -> float:
    """A step of ranks that share the cores: see the beginning of this file."""
    by = crowding(ranks, cores)
    ready_s = {param: by * ready_s for param, ready_s in job.ready_s.items()}
    crowded = Job(by * job.alone_s, by * job.backward_s, ready_s, job.plan)
    inside = slower(hop, by)
    ring, work = all_reduce(ranks, hosts, inside, wire), all_reduce(ranks, 1, inside, inside)
    bytes_per_s = min(ring.bytes_per_s, work.bytes_per_s)
    taken = 0.0 if ranks < cores else bytes_per_s / work.bytes_per_s
    return crowded.step_s(Link(ring.latency_s, bytes_per_s, taken))


def crowding(ranks: int, cores: float) -> float:
    return max(1.0, ranks / cores)


def slower(link: Link, by: float) -> Link:
    return Link(by * link.latency_s, link.bytes_per_s / by)


def predictions(job: Job, hop: Link, measured: Mapping[Place, Measured]) -> dict[str, dict[str, float]]:
    """Predicted and measured steps, by place in words."""
    rows = {}
    for (ranks, hosts, rate), (measured_s, cores) in measured.items():
        wire = Link(hop.latency_s, GOODPUT * bytes_per_second(rate)) if rate else FREE
        step_s = predicted_s(job, hop, wire, ranks, hosts, cores)
        where = f"{ranks} ranks, {f'2 hosts at {rate}' if rate else 'one host'}"
        error = step_s / measured_s - 1
        rows[where] = {
            "cores": cores,
            "predicted_ms": 1e3 * step_s,
            "measured_ms": 1e3 * measured_s,
            "error": error,
        }
    return rows
