"""Does a step become as much shorter as x-ray predicts, if its advice is followed?

    sudo python -m benchmarks advice            # all cases; three minutes
    python -m benchmarks advice --cases late    # those whose name contains this

In each case ranks train with a known problem. X-ray records some steps. Then the change that it should advise is
made, and the steps before and after race. Where x-ray names arguments or calls, these make the change; else the
problem is removed.

[Note: sleeping layers]
A machine with fewer cores than ranks cannot show how ranks wait for each other: they wait for cores. So layers
sleep for most of the time in which they would compute, and compute little.

The cases with a slow wire run on two hosts made of network namespaces (`namespaces.py`), which needs root.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks.contestants import STEPS_UNTIL_TUNED
from benchmarks.display import Table, console_of, table_of
from benchmarks.harness import Rounds, estimate, median_ms, timed_race
from benchmarks.launch import run_ranks
from benchmarks.namespaces import HOSTS, limit_rate, settle, two_hosts, why_there_can_be_none
from benchmarks.question import Options, Report, report_of, write
from minddp import DistributedDataParallel
from minddp.tools.xray.what_if import WhatIf
from minddp.xray import XRay

AIM = (0.20, 0.02, 0.9)  #: off by this share of the measured gain, or of a step; in this share of the cases
BEFORE, AFTER = "before", "after"
WIDTHS = (512, 256, 384, 128, 64, 256, 512)
RECORDED_STEPS, STEPS_PER_TURN = 20, 10
_PLAN_OPTIONS = ("bucket_cap_mb", "first_bucket_cap_mb")


@dataclass(frozen=True)
class Setup:
    """How ranks train: milliseconds slept in a step, by phase, on `every` rank, and more if `late`.

    The last rank is late, once in `period` steps, and its batch is `batch_of_last` times as large. `rate` is that
    of the cable between two hosts, `optimizes` if there are optimizer steps, in `optimizer_ms`.
    """

    every: Mapping[str, float] = field(default_factory=lambda: {"forward": 6.0, "backward": 12.0})
    late: Mapping[str, float] = field(default_factory=dict)
    period: int = 1
    batch: int = 32
    batch_of_last: int = 1
    rate: str | None = None
    optimizes: bool = True
    widths: Sequence[int] = WIDTHS
    wrapper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """`advice` is a part of the title of the change; `after` is without the problem, if x-ray has no code."""

    advice: str
    before: Setup
    after: Setup | None = None
    world_size: int = 2


def late_in(phase: str, world_size: int, ms: float = 8.0, advice: str | None = None, **options: Any) -> Case:
    """The last rank is late in one phase."""
    before = Setup(late={phase: ms}, **options)
    return Case(advice or "as quick as the others", before, replace(before, late={}), world_size)


def slow_wire(
    advice: str, world_size: int = 2, rate: str = "400mbit", then: str | None = None, **wrapper: Any
) -> Case:
    before = Setup(rate=rate, wrapper=wrapper)
    return Case(advice, before, replace(before, rate=then) if then else None, world_size)


_COMPUTING = Setup(every={}, batch=512)
_SLOW_LOADER = Setup(every={"data": 8, "forward": 6, "backward": 12})
_SLOW_OPTIMIZER = Setup(every={"optimizer": 8, "forward": 6, "backward": 12})
_LARGE = Setup(widths=(1024,) * 5, every={"forward": 3, "backward": 6})

CASES: dict[str, Case] = {
    "late in data": late_in("data", 2),
    "late in forward": late_in("forward", 3),
    "late after forward, ranks compute": late_in("loss", 2, ms=10, every={}, batch=512),
    "late in backward": late_in("backward", 4),
    "late in the optimizer": late_in("optimizer", 3),
    "late in one step of ten": late_in("forward", 2, ms=60, period=STEPS_PER_TURN, advice="in single steps"),
    "late in all phases": Case(
        "as quick as the others",
        Setup(late={"data": 2, "forward": 3, "backward": 6, "optimizer": 2}),
        Setup(),
        4,
    ),
    "late by its batch, ranks compute": Case(
        "as quick as the others", replace(_COMPUTING, batch_of_last=2), _COMPUTING
    ),
    "slow wire": slow_wire("a wire 10 times", then="4gbit", bucket_cap_mb=0.05),
    "slow wire, 4 ranks": slow_wire("a wire 10 times", 4, rate="200mbit", then="2gbit", bucket_cap_mb=0.05),
    "slow wire, a hook of half the bytes": slow_wire("half the bytes", bucket_cap_mb=0.05),
    "too few buckets, slow wire": slow_wire("buckets of", bucket_cap_mb=25),
    "too many buckets, slow wire": Case(
        "bucket", Setup(rate="400mbit", widths=(128,) * 17, wrapper={"bucket_cap_mb": 0})
    ),
    "too late a first bucket, slow wire": slow_wire("the first bucket earlier", bucket_cap_mb=1),
    "too many buckets": Case("bucket", Setup(widths=(64,) * 81, wrapper={"bucket_cap_mb": 0})),
    "too many buckets, ranks compute": Case(
        "bucket", Setup(every={}, batch=128, widths=(64,) * 81, wrapper={"bucket_cap_mb": 0})
    ),
    "slow loader": Case("data ready", _SLOW_LOADER, replace(_SLOW_LOADER, every=Setup().every), 3),
    "slow optimizer": Case("an optimizer", _SLOW_OPTIMIZER, replace(_SLOW_OPTIMIZER, optimizes=False), 2),
    "copy back": Case("no copy back", _LARGE),
}


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Follow x-ray's advice in many cases, and measure the gain."""

    cases: str = ""
    """Only those whose name contains this."""
    rounds: int = 5
    timeout_s: float = 100.0


def main(config: Config) -> None:
    console = console_of()
    chosen = {name: case for name, case in CASES.items() if config.cases in name}
    needs_hosts = any(case.before.rate for case in chosen.values())
    if needs_hosts and (reason := why_there_can_be_none()):
        console.print(f"Cases with a slow wire are left out: {reason}.")
        chosen = {name: case for name, case in chosen.items() if not case.before.rate}
    cases = {}
    for name, case in chosen.items():
        cases[name] = in_ranks(name, case, config)
        console.print(ROW.format(name=name, **cases[name]), highlight=False)
    report = report_of("the gain of a step by the advice of x-ray, measured and predicted", config, cases=cases)
    for table in tables(report):
        table.show(console)
    if (path := config.path("advice")) is not None and not config.cases:
        write(report, path)
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), report))


def in_ranks(name: str, case: Case, config: Config) -> dict[str, Any]:
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(case.before.rate)) if case.before.rate else None
        outcome, *_ = run_ranks(
            followed,
            name,
            config,
            world_size=case.world_size,
            threads=config.threads,
            timeout_s=config.timeout_s,
            settle=partial(settle, hosts, case.world_size // HOSTS) if hosts else None,
        )
    return outcome


# ------------------------------------------------------------------ on each rank


def followed(rank: int, name: str, config: Config) -> dict[str, Any]:
    """Record, follow the advice, and race; the figures of the case."""
    case, seed = CASES[name], config.seed
    cable = Cable(case.before.rate)
    before = Training(case.before, cable, seed, case.before.wrapper)
    before.warm_up()
    with XRay(before.ddp) as x:
        for _ in range(RECORDED_STEPS):
            before.step()
    shared: list[Any] = [None]
    if rank == 0:
        shared = [advised(x.result.analysis, case.advice)]
    dist.broadcast_object_list(shared)
    advice = shared[0]
    code = "" if case.after else advice["code"]
    after = Training(case.after or case.before, cable, seed, case.before.wrapper, code)
    after.warm_up()
    before.period = after.period = case.before.period + (case.before.period > 1)  # a turn has an untimed step
    rounds = Rounds(2 if config.size == "smoke" else config.rounds, 1, seed)
    raced = timed_race({BEFORE: before.step, AFTER: after.step}, [[BEFORE, AFTER]], rounds, STEPS_PER_TURN).wall
    measured = estimate(1e3 * (raced[BEFORE] - raced[AFTER]), seed)
    step_ms = median_ms(raced[BEFORE])
    off_ms = abs(advice["predicted_ms"] - measured.median)
    share_of_gain, share_of_step, _ = AIM
    return advice | {
        "ranks": case.world_size,
        "step_ms": step_ms,
        "measured_ms": dataclasses.asdict(measured),
        "is_met": bool(off_ms <= max(share_of_gain * abs(measured.median), share_of_step * step_ms)),
    }


def advised(analysis: Any, part: str) -> dict[str, Any]:
    """The best change whose title has this part, and its place in the advice; 0 if it is not there."""
    said: list[WhatIf] = analysis.advice
    change = next(change for change in analysis.what_ifs[1:] if part in change.title)
    return {
        "title": change.title,
        "code": change.code,
        "place": said.index(change) + 1 if change in said else 0,
        "recorded_ms": analysis.typical.length_ns / 1e6,
        "simulated_ms": analysis.what_ifs[0].step_ns / 1e6,
        "noise_ms": analysis.noise_ns / 1e6,
        "predicted_ms": change.gain_ns / 1e6,
    }


class Training:
    """One rank's model, wrapped as `code` says, or by the `wrapper`'s options; `step` trains."""

    def __init__(self, setup: Setup, cable: Cable, seed: int, wrapper: Mapping[str, Any], code: str = ""):
        torch.manual_seed(seed)
        self._cable, self._is_tuned = cable, '"auto"' in code
        self.setup, self.period, self._taken = setup, setup.period, 0
        self._is_last = dist.get_rank() == dist.get_world_size() - 1
        layers = [Sleeping(nn.Linear(*ends), self._sleep) for ends in pairwise(setup.widths)]
        model = nn.Sequential(*layers)
        options = {k: v for k, v in wrapper.items() if not (code and "bucket" in code and k in _PLAN_OPTIONS)}
        if code.startswith("ddp."):
            self.ddp = DistributedDataParallel(model, **options)
            eval(code, {"ddp": self.ddp, "fp16_compress_hook": fp16_compress_hook})
        else:
            wrap = partial(DistributedDataParallel, **({**options, **wrapper} if "view" in code else options))
            self.ddp = eval(
                code or "DistributedDataParallel(model)", {"DistributedDataParallel": wrap, "model": model}
            )
        self._optimizer = torch.optim.SGD(self.ddp.parameters(), 0.01)
        self._optimizer.register_step_pre_hook(lambda *_: self._sleep("optimizer"))
        self._inputs = torch.randn(setup.batch * (setup.batch_of_last if self._is_last else 1), setup.widths[0])

    def warm_up(self) -> None:
        """Until buckets are final."""
        for _ in range(STEPS_UNTIL_TUNED if self._is_tuned else 10):
            self.step()

    def step(self) -> None:
        self._cable.set_rate(self.setup.rate)
        self._taken += 1
        loss = self.ddp(self._inputs).square().mean()
        self._sleep("loss")
        loss.backward()
        if self.setup.optimizes:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._sleep("data")

    def _sleep(self, phase: str) -> None:
        """All of it, or a layer's share; a late rank is late in the first layer that it computes."""
        is_late = self._is_last and self._taken % self.period == 0
        ms = self.setup.every.get(phase, 0.0) + (self.setup.late.get(phase, 0.0) if is_late else 0.0)
        parts = len(self.setup.widths) - 1 if phase in ("forward", "backward") else 1
        if ms:
            time.sleep(ms / parts / 1e3)


class Sleeping(nn.Module):
    """A layer before whose forward and backward the rank sleeps. See [Note: sleeping layers]."""

    def __init__(self, layer: nn.Module, sleep: Callable[[str], None]):
        super().__init__()
        self.layer, self._sleep = layer, sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._sleep("forward")
        y = self.layer(x).relu()
        if y.requires_grad:
            y.register_hook(lambda _grad: self._sleep("backward"))
        return y


class Cable:
    """The end of the cable at this rank's host."""

    def __init__(self, rate: str | None):
        self._rate = rate

    def set_rate(self, rate: str | None) -> None:
        """In the untimed step of a turn."""
        if rate is not None and rate != self._rate:
            self._rate = rate
            limit_rate(rate)


# ------------------------------------------------------------------ tables

DOCUMENT = Path(__file__).parent.parent / "docs" / "xray.md"
_BEGIN, _END = "<!-- advice -->", "<!-- end of advice -->"


def with_table(document: str, report: Report) -> str:
    """The page with the table of this report."""
    before, _, rest = document.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    (table,) = tables(report)
    return f"{before}{_BEGIN}\n{table.markdown()}\n{_END}{after}"


ROW = "{name}: predicted {predicted_ms:.2f} ms, measured {measured_ms[median]:.2f} ms of {step_ms:.1f}; {is_met}"
COLUMNS = {
    "ranks": "{ranks}",
    "step ms": "{step_ms:.1f}",
    "what is changed": "{title}",
    "place": "{place}",
    "predicted ms": "{predicted_ms:.2f}",
    "measured ms": "{measured_ms[median]:.2f} ({measured_ms[low]:.2f}–{measured_ms[high]:.2f})",
    "met": "{met}",
}


def tables(report: Report) -> Iterator[Table]:
    """`place` is that of the change in the advice; 0 if it is not there."""
    cases = {name: of | {"met": "yes" if of["is_met"] else "no"} for name, of in report["cases"].items()}
    met = sum(of["is_met"] for of in cases.values())
    share_of_gain, share_of_step, share_of_cases = AIM
    aimed = math.ceil(share_of_cases * len(cases))
    caption = (
        f"Within {share_of_gain:.0%} of the measured gain or {share_of_step:.0%} of a step in {met} of "
        f"{len(cases)} cases; the aim of {aimed} is {'met' if met >= aimed else 'missed'}."
    )
    yield table_of("X-ray: the gain of a step by its advice", "case", COLUMNS, cases, caption)
