"""A task for `minddp train` whose ranks die at chosen moments, once each: those in MORTAL, as JSON.

A moment is a call in which a rank of a group of so many is: the third time that it computes a loss, say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minddp.tools.tasks import gpt
from minddp.tools.train.checkpoint import CheckpointFiles
from minddp.tools.train.task import Task, cross_entropy

LIMIT_S = 120.0
calls: Counter[tuple[int, str]] = Counter()


def at(moment: str) -> None:
    """Die here, if it is due; or wait until another process asks to join."""
    plan, world = json.loads(os.environ["MORTAL"]), dist.get_world_size()
    calls[world, moment] += 1
    here = [world, dist.get_rank(), moment, calls[world, moment]]
    marker = Path(plan["folder"], "-".join(map(str, here)))
    if here in plan["deaths"] and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if here == plan.get("cut_at"):  # this host is taken away
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True, timeout=20)
    if here == plan.get("wait_at"):
        host, _, port = os.environ["MINDDP_ELASTIC_STORE"].rpartition(":")
        store, deadline = dist.TCPStore(host, int(port), is_master=False), time.monotonic() + LIMIT_S
        number = 1  # of the next generation
        while time.monotonic() < deadline:
            if store.check([f"members/generation/{number}"]):
                number += 1
            elif store.check([f"join_requests/{number}"]):
                break
            time.sleep(0.01)


def task() -> Task:
    """A tiny GPT with dropout."""
    tiny = gpt.task(layers=1, heads=2, width=16, context=8, corpus_mib=1, dropout=0.2)
    if "MORTAL" not in os.environ:
        return tiny

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        at("training" if torch.is_grad_enabled() else "validation")
        return cross_entropy(outputs, targets)

    write = CheckpointFiles.write

    def mortal_write(self: CheckpointFiles, *args: Any, **kwargs: Any) -> None:
        at("checkpoint")
        write(self, *args, **kwargs)

    CheckpointFiles.write = mortal_write  # type: ignore[method-assign]
    return Task(tiny.training, tiny.validation, tiny.build_model, loss)
