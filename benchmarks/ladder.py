"""What does each rung of the reference ladder look like, beside torch's DDP and minddp?

    python -m benchmarks ladder --out DIR     # ladder.png: all of them on one scale

Every wrapper trains the same layers in the same process group, and some of its steps are recorded. A rung reports
no events, so it is recorded from outside: `RungSource` is between it and its wire. docs/learning/ladder.md reads
such a recording, rung by rung.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from benchmarks.launch import run_ranks
from minddp.core.events import EventKind, EventStream
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.xray.result import Result
from minddp.tools.xray.sources import Source
from minddp.tools.xray.xray import XRay

try:
    from reference.interface import DataParallel
    from reference.ladder import rungs
except ImportError:  # in a wheel: see setup.py
    from minddp.reference.interface import DataParallel  # type: ignore[no-redef]
    from minddp.reference.ladder import rungs  # type: ignore[no-redef]

MIB = 2**20


@dataclass(frozen=True)
class Config:
    """Record some steps of each rung, and show them side by side."""

    out: Path = Path("runs/ladder")
    """Folder for ladder.png, and for the page and the recording of each rung."""
    depth: int = 6
    width: int = 512
    """Width of each layer; 512 makes 1 MiB of gradients each."""
    batch_size: int = 128
    cap_mib: float = 2.0
    """Capacity of a bucket."""
    warmup_steps: int = 5
    steps: int = 9
    """Recorded; the one of median length is shown."""
    world_size: int = 2
    threads: int = 1
    timeout_s: float = 300.0

    def module(self) -> nn.Module:
        """The module that every wrapper trains, the same on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.depth)))


Rung = Callable[[nn.Module], DataParallel]


def main(config: Config) -> None:
    run_ranks(record_all, config, world_size=config.world_size, threads=config.threads, timeout_s=config.timeout_s)


def record_all(rank: int, config: Config) -> None:
    from benchmarks.picture import save_picture  # with matplotlib, which is optional

    results = results_of_all(rank, config)
    for result in results:
        for suffix in (".html", ".json"):
            result.save(config.out / f"{result.recording.title}{suffix}")
        result.explain()
    if rank == 0:
        save_picture(results, config.out / "ladder.png")


def results_of_all(rank: int, config: Config) -> list[Result]:
    """Every rung from the bottom, then torch's DDP, then minddp."""
    makers = rungs(cap_bytes=int(config.cap_mib * MIB))
    results = [record_rung(name, make, rank, config) for name, make in makers.items()]
    for title, wrap in {"torch's DDP": TorchDDP, "minddp": minddp.DistributedDataParallel}.items():
        ddp = wrap(config.module(), bucket_cap_mb=config.cap_mib)
        results.append(record(title, ddp, ddp, lambda: None, rank, config))
    return results


def record_rung(name: str, make: Rung, rank: int, config: Config) -> Result:
    source = RungSource(name, config.module(), make)
    return record(name, source, source.rung, source.rung.synchronize, rank, config)


def record(
    title: str,
    source: nn.Module | Source,
    model: nn.Module,
    synchronize: Callable[[], None],
    rank: int,
    config: Config,
) -> Result:
    """Train for some steps, and record the last ones."""
    inputs = torch.randn(config.batch_size, config.width, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(inputs).square().mean().backward()
        synchronize()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(config.warmup_steps):
        step()
    dist.barrier()
    with XRay(source, title=title) as x:
        for _ in range(config.steps):
            step()
    return x


class RungSource:
    """A rung of the ladder, watched at its wire, at its module and at its parameters."""

    wrapper = "a rung of the ladder"
    has_plan = False
    adds_after_s = 0.0

    def __init__(self, title: str, module: nn.Module, make: Rung):
        self.title = title
        self._named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        for index, (_, param) in enumerate(self._named):  # before the rung's own hooks, which may send the gradient
            param.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
        self.rung = make(module)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = self._named[0][1].device
        self.backend: str = dist.get_backend()
        self.steps_taken = 0
        self.events = EventStream()
        self._emit = self.events.emit
        self._labels: list[str] = []  # of this step's messages
        self._seen: list[str] = []  # of the last whole step's
        self._unpacking = -1
        self._callbacks: list[torch.futures.Future] = []  # of completions; they run in the backend's threads
        self._install()

    @property
    def store(self) -> dist.Store | None:
        return dist.distributed_c10d._get_default_store()

    @property
    def topic(self) -> str:
        return f"minddp/ladder/{self.title}/{self.steps_taken}"

    def plan(self) -> BucketPlan:
        params = [ParamSpec(name, param.numel(), param.dtype, param.device) for name, param in self._named]
        return plan_from_groups(params, [*map(self._members, self._seen)], "messages as they were sent")

    # ------------------------------------------------------------------ events

    def _install(self) -> None:
        rung: Any = self.rung
        rung.register_forward_pre_hook(lambda *_: self._emit(EventKind.FORWARD_BEGIN))
        rung.register_forward_hook(self._on_forward_end)
        self._send, rung.wire.average = rung.wire.average, self._average
        self._wait, rung.synchronize = rung.synchronize, self._synchronize

    def _members(self, label: str) -> tuple[int, ...]:
        """The parameters that a message carries: its label names one, a bucket, or everything."""
        names = [name for name, _ in self._named]
        if label in names:
            return (names.index(label),)
        number = label.removeprefix("bucket ")
        if number == label:
            return tuple(range(len(names)))
        plan: Any = self.rung
        return tuple(names.index(name) for name in plan.plan[int(number)].names)

    def _on_forward_end(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(self._on_backward_begin)
        self._emit(EventKind.FORWARD_END)

    def _on_backward_begin(self, _grad: Tensor) -> None:
        self._labels = []
        self._emit(EventKind.BACKWARD_BEGIN)
        Variable._execution_engine.queue_callback(partial(self._emit, EventKind.GRADIENTS_COMPLETE))

    def _on_gradient(self, index: int, _param: Tensor) -> None:
        self._emit(EventKind.PARAM_READY, index)

    def _average(self, tensor: Tensor, label: str) -> WatchedWork:
        index = len(self._labels)
        self._labels.append(label)
        self._close_unpacking()
        self._emit(EventKind.BUCKET_READY, index)
        self._emit(EventKind.BUCKET_LAUNCHED, index)
        work = self._send(tensor, label)
        if self.events.sink is not None:
            emitted = work.get_future().then(lambda _: self._emit(EventKind.BUCKET_COMPLETED, index))
            self._callbacks.append(emitted)
        return WatchedWork(work, self._close_unpacking, partial(self._on_waited, index))

    def _on_waited(self, index: int) -> None:
        self._emit(EventKind.BUCKET_WAITED, index)
        self._unpacking = index

    def _close_unpacking(self) -> None:
        """Between two waits a rung unpacks the message of the first."""
        if self._unpacking >= 0:
            self._emit(EventKind.BUCKET_UNPACKED, self._unpacking)
            self._unpacking = -1

    def _synchronize(self) -> None:
        self._wait()
        self._unpacking = -1
        self._seen = self._labels
        self.steps_taken += 1
        self._emit(EventKind.BACKWARD_END)
        torch.futures.wait_all(self._callbacks)  # a callback that still runs would abort the interpreter's exit
        self._callbacks.clear()


@dataclass(frozen=True)
class WatchedWork:
    """A message under way, with calls before and after the wait for it."""

    work: dist.Work
    before: Callable[[], None]
    after: Callable[[], None]

    def wait(self) -> None:
        self.before()
        self.work.wait()
        self.after()
