"""A training that survives: the script of each rank. PLAN, as JSON, has its options and its faults.

Each process writes a report, lines of JSON: all events with their times, and at the end the digest of all bits. A
fault is a process, by its number, and a moment in a step, such as "forward".
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.tools.elastic import session as elastic_session
from minddp.tools.watchdog import Stuck
from tests.tools.elastic.trainings import digest


def batch(step: int, share: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + share))


class Script:
    def __init__(self, plan: dict[str, Any], member: int):
        self.plan = plan
        self.member = member
        self.report: Any = None
        if plan["folder"] is not None:
            self.report = open(f"{plan['folder']}/{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
        self.step = 0
        self.struck: list[Any] = []
        self.num_threads: dict[int, int] = {}  # also those that Python does not know, by number of ranks

    def note(self, event: str, **facts: Any) -> None:
        facts = {"event": event, "time": time.time(), "pid": os.getpid(), "member": self.member, **facts}
        self.report.write(json.dumps(facts) + "\n")

    def at(self, moment: str) -> None:
        """Die, stop or fail here, once, if the plan says so. A fault names a member by its number, from 1 on."""
        for fault in self.plan.get("faults", ()):
            is_here = (fault["member"], fault["moment"], fault["step"]) == (self.member, moment, self.step)
            if is_here and fault not in self.struck:
                self.struck.append(fault)
                self.note("fault", moment=moment, signal=fault["signal"], step=self.step)
                if fault["signal"] == "error":
                    raise RuntimeError("a mistake")
                if fault["signal"] == "failed attempt":
                    self.fail_to_connect()
                    continue
                if fault["signal"] == "stuck":
                    time.sleep(0.2)  # the others have voted
                    raise Stuck("a connection was lost, but no rank")
                os.kill(os.getpid(), getattr(signal, fault["signal"]))

    def fail_to_connect(self) -> None:
        """Try to make a group whose other rank never comes."""
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = datetime.timedelta(seconds=0.2)
        with suppress(RuntimeError):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=limit)

    def hold(self) -> None:
        """Wait in this step, if the plan says so, until so many are members or ask to join, or the test goes on.

        In the second case also in later steps; but not when ranks are lost, nor does one rank keep others waiting.
        """
        if self.step < self.plan.get("hold", self.plan["steps"]):
            return
        term = self.session._term
        requests = partial(self.session._membership.join_requests, term.generation.number + 1)
        if (num_members := self.plan.get("until_members")) is not None:
            if self.step == self.plan["hold"]:
                self.wait_for(lambda: len(term.generation.members) + len(requests()) >= num_members)
            return
        is_alone = len(term.generation.members) == 1
        go = Path(self.plan["folder"], "go")
        self.wait_for(lambda: go.exists() or term.is_over.is_set() or (is_alone and requests()))

    def wait_for(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120.0
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.01)

    # ------------------------------------------------------------------ the training itself

    def build(self) -> tuple[nn.Module, Any, torch.optim.Optimizer, Any]:
        torch.manual_seed(3)
        hidden = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64)
        model = nn.Sequential(*hidden, nn.Linear(64, 4))
        ddp = minddp.DistributedDataParallel(
            model, logical_ranks=8, transport=self.plan.get("transport", "auto"), bucket_cap_mb=0.005
        )
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return model, ddp, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)

    def backward(self, ddp: Any, step: int, share: int) -> None:
        ddp(batch(step, share)).square().mean().backward()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    def result(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        state = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        return digest([*model.state_dict().values(), *state, optimizer.param_groups[0]["lr"]])

    def train(self, session: minddp.elastic.Session) -> None:
        self.session = session
        model, ddp, optimizer, scheduler = self.build()
        model[0].weight.register_post_accumulate_grad_hook(lambda _: self.at("backward"))
        self.hook_into(session, ddp)
        self.note("built")
        for step in session.steps(ddp, optimizer, last=self.plan["steps"], also=[scheduler]):
            with step:
                self.step = step.number
                self.note("begin", step=step.number, generation=session.generation.number)
                self.hold()
                for share in ddp.shares():
                    self.at("forward")
                    self.backward(ddp, step.number, share)
                    time.sleep(self.plan.get("share_s", 0.0))
                self.at("after vote")
                self.update(model, optimizer, scheduler)
                self.at("end of step")
                number, world = session.generation.number, dist.get_world_size()
                self.note("step", step=step.number, rank=dist.get_rank(), world=world, generation=number)
                self.num_threads[world] = max(self.num_threads.get(world, 0), len(os.listdir("/proc/self/task")))
        self.note("end", digest=self.result(model, optimizer), threads=self.num_threads)

    def hook_into(self, session: minddp.elastic.Session, ddp: minddp.DistributedDataParallel) -> None:
        """Moments inside of the package."""
        replaced = {
            "vote": (session, "_vote"),
            "regroup": (session, "_join_generation"),
            "construction": (session, "_connect"),
            "move": (ddp, "move_to_group"),
            "receive": (session, "_synchronize"),
            "buffers": (ddp.logical_ranks, "_overwrite_buffers"),
        }
        for moment, (owner, name) in replaced.items():
            original = getattr(owner, name)

            def wrapper(*args: Any, _moment: str = moment, _original: Any = original, **kwargs: Any) -> Any:
                if _moment != "receive" or session.generation.joined:
                    self.at(_moment)
                result = _original(*args, **kwargs)
                self.at(f"after {_moment}")
                if _moment in ("regroup", "construction", "move", "receive"):
                    self.note(f"after {_moment}", generation=session.generation.number)
                return result

            setattr(owner, name, wrapper)


@cache
def undisturbed(steps: int) -> str:
    """The digest at the end of a training on one rank, without a session."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    script = Script({"folder": None, "steps": steps}, 0)
    model, ddp, optimizer, scheduler = script.build()
    for step in range(steps):
        for share in ddp.shares():
            script.backward(ddp, step, share)
        script.update(model, optimizer, scheduler)
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    return script.result(model, optimizer)


def main() -> None:
    torch.set_num_threads(1)
    plan = json.loads(os.environ["PLAN"])
    if "broken" in plan:
        from tests.breaks import apply
        from tests.tools.elastic.breaks import BREAKS

        apply(next(broken for broken in BREAKS if broken.name == plan["broken"]))
    faulthandler.register(signal.SIGUSR1)
    if "connect_limit_s" in plan:
        elastic_session.CONNECT_LIMIT_S = plan["connect_limit_s"]
    session = minddp.elastic.join()
    script = Script(plan, session._membership.count("started"))
    try:
        script.train(session)
    except RuntimeError:
        if plan.get("lingers"):
            script.wait_for(Path(plan["folder"], "go").exists)
        raise


if __name__ == "__main__":
    sys.exit(main())
