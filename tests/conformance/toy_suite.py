"""A suite to test the running of suites with: what a test can do, good and bad. Only ever imported in a stage.

And two classes to run tests with. `Unchanged` is torch's own under another name: what passes natively must pass
with it, or else the swap is at fault. `NeverSynchronises` must fail.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Toy(unittest.TestCase):
    def test_builds(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        DistributedDataParallel(torch.nn.Linear(1, 1))

    def test_is_vacuous(self) -> None:
        print("DistributedDataParallel is only spoken of")

    def test_fails(self) -> None:
        raise ValueError("as was to be shown")

    def test_skips(self) -> None:
        self.skipTest("no reason")

    def test_dies(self) -> None:
        print("last words", flush=True)
        os._exit(0)

    def test_hangs(self) -> None:
        print("waiting for ever", flush=True)
        time.sleep(1000)

    def test_hangs_at_first(self) -> None:
        mark = pathlib.Path(os.environ["TEMP_DIR"], "has hung")  # the stage's, so that the second attempt finds it
        if not mark.exists():
            mark.touch()
            time.sleep(1000)
        self.test_builds()

    def test_leaves_a_process_behind(self) -> None:
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        raise ValueError(f"left behind: {left.pid}")


class ToyOnGpu(unittest.TestCase):
    @unittest.skipIf(not torch.cuda.is_available(), "needs a GPU")
    def test_moves(self) -> None:
        module = torch.nn.Linear(1, 1).cuda(3)
        assert module.weight.to("cuda:1").device.type == "cpu"
        assert torch.zeros(1, device=2).device.type == "cpu"
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
        dist.init_process_group(backend="nccl", store=dist.HashStore(), rank=0, world_size=1)
        DistributedDataParallel(module, device_ids=[3])


class Unchanged(DistributedDataParallel):
    """Torch's DDP."""


class NeverSynchronises(DistributedDataParallel):
    """Torch's DDP as if always under `no_sync`: every rank keeps its own gradients."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = False
        return super().forward(*inputs, **kwargs)
