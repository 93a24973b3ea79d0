"""The work of one rank: wrap the model, take an optimizer step, validate, and save and restore the state."""

from __future__ import annotations

import copy
import logging
import math
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp
from minddp.tools.train.batches import Batch, Batches, validation_batches
from minddp.tools.train.checkpoint import State
from minddp.tools.train.metrics import Averages, Means
from minddp.tools.train.optimizer import learning_rate, make_optimizer
from minddp.tools.train.settings import Settings, arguments_for
from minddp.tools.train.task import Task
from minddp.tools.train.world import World

WRAPPERS: dict[str, type[nn.Module]] = {
    "minddp": minddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_log = logging.getLogger(__name__)


class Trainer:
    """One rank's part of a run. Every rank must call the methods marked *collective* in the same order."""

    def __init__(self, settings: Settings, world: World, task: Task):
        self.settings, self.world, self.task = settings, world, task
        torch.manual_seed(settings.seed)  # the same weights on every rank
        self.model = task.build_model().to(world.device)
        wrapper = WRAPPERS[settings.ddp]
        options = arguments_for(wrapper, settings.ddp_options, f"--ddp {settings.ddp} --ddp-options")
        device_ids = [world.device.index] if world.device.type != "cpu" else None
        self.ddp: Any = wrapper(self.model, device_ids=device_ids, **options)
        self.optimizer = make_optimizer(self.model, settings)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
        self.batches = Batches(task.training, settings, world)
        self.step = 0  # optimizer steps taken
        # Since the last training record
        self.averages = Averages(world.device)
        self.training_s = 0.0
        self.gradient_norm = torch.zeros(())
        self._rehearse()
        self._stream = iter(self.batches)
        torch.manual_seed(settings.seed + 1 + world.rank)  # but not the same dropout

    def optimizer_step(self) -> None:
        """Run forward and backward for all samples of a step, then update the parameters. Collective."""
        began = time.monotonic()
        passes = self.settings.accumulate
        for i in range(passes):
            # Only the last pass communicates. The forward must be inside no_sync, too: there DDP decides whether
            # the coming backward communicates.
            with self.ddp.no_sync() if i < passes - 1 else nullcontext():
                loss = self._loss(self.ddp, next(self._stream), self.averages)
                self.scaler.scale(loss / passes).backward()
        self._update()
        self.step += 1
        self.training_s += time.monotonic() - began

    def _update(self) -> None:
        """Clip the averaged gradients and step the optimizer.

        In float16 small gradients underflow to zero. `GradScaler` multiplies the loss, and so all gradients, by a
        scale. It divides the gradients again before clipping, skips the step if one has overflowed, and lowers the
        scale then. Averaged gradients are equal on all ranks, so all ranks skip the same steps.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.world.size, self.step)
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.settings.clip_norm is None else self.settings.clip_norm
        self.gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, model: nn.Module, batch: Batch, averages: Averages) -> Tensor:
        """The loss of one batch, which is added to `averages`.

        Autocast runs matrix products in 16 bits and keeps parameters, gradients and sums in 32. It covers forward
        and loss; backward uses the same types by itself.
        """
        inputs, targets = (part.to(self.world.device, non_blocking=True) for part in batch)
        dtype = DTYPES[self.settings.precision]
        with torch.autocast(self.world.device.type, dtype, enabled=dtype != torch.float32):
            outputs = model(inputs)
            loss = self.task.loss(outputs, targets)
        averages.add(self.task, loss.detach(), outputs.detach(), targets)
        return loss

    @torch.no_grad()
    def validate(self) -> Means:
        """Averages over the held-out data, which the ranks share. Collective.

        This runs the model without its wrapper: ranks may have different numbers of batches, and DDP's forward can
        be a collective. BatchNorm statistics may differ between ranks; those of rank 0 are used.
        """
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        averages = Averages(self.world.device)
        self.model.eval()
        for batch in validation_batches(self.task.validation, self.settings, self.world):
            self._loss(self.model, batch, averages)
        self.model.train()
        return averages.over_ranks()

    def _rehearse(self) -> None:
        """Run one forward and backward and discard the results. Collective.

        DDP has a state that no checkpoint contains. The first backward shows the order in which gradients become
        ready, and the buckets of all later steps are made in this order. From three ranks on, the rounding of a sum
        depends on the place in its bucket. So every run begins with a pass that leaves nothing but the buckets;
        without it, the first step of a resumed run would round differently.
        """
        before = copy.deepcopy(self.model.state_dict())  # of buffers, which a forward changes
        self._loss(self.ddp, next(iter(self.batches)), Averages(self.world.device)).backward()
        self.batches.samples = 0
        self.optimizer.zero_grad(set_to_none=True)
        self.model.load_state_dict(before)

    def state(self) -> State:
        """Everything that determines how the run continues. Collective."""
        random = {"cpu": torch.get_rng_state()}  # of models; samples have random states of their own
        if self.world.device.type != "cpu":
            random["device"] = torch.get_device_module(self.world.device).get_rng_state(self.world.device)
        random_of_ranks: list[Any] = [None] * self.world.size
        dist.all_gather_object(random_of_ranks, random, group=self.world.control)
        return {
            "step": self.step,
            "epoch": self.batches.epoch,
            "samples": self.batches.samples,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random_of_ranks": random_of_ranks,
        }

    def restore(self, state: State) -> None:
        """Continue from `state`; with the same bits if settings and the number of ranks are the same."""
        self.step = state["step"]
        self.batches.epoch, self.batches.samples = state["epoch"], state["samples"]
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # of the settings, which may have changed
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])
        ranks_before = len(state["random_of_ranks"])
        if ranks_before != self.world.size:
            _log.warning("The checkpoint is from %d ranks; the run continues with other bits.", ranks_before)
            # Random numbers that the run has not drawn before
            torch.manual_seed(self.settings.seed + 1 + self.world.rank + self.world.size * (1 + self.step))
            return
        random = state["random_of_ranks"][self.world.rank]
        torch.set_rng_state(random["cpu"])
        if "device" in random and self.world.device.type != "cpu":
            torch.get_device_module(self.world.device).set_rng_state(random["device"], self.world.device)
