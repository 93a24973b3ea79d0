"""The work of one rank: wrap the model, take an optimizer step, validate, and save and restore the state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.utils.data import default_collate

import minddp
from minddp.comm_hooks import HOOKS, ErrorFeedback
from minddp.platform import streams
from minddp.tools.elastic.random_state import random_state_is_kept
from minddp.tools.train.batches import Batch, Batches, validation_batches
from minddp.tools.train.checkpoint import DECISIVE, State
from minddp.tools.train.metrics import Averages, Means
from minddp.tools.train.optimizer import learning_rate, make_optimizer
from minddp.tools.train.settings import Settings, SettingsError, arguments_for
from minddp.tools.train.task import Task
from minddp.tools.train.world import World

WRAPPERS: dict[str, type[nn.Module]] = {
    "minddp": minddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """One rank's part of a run. Every rank must call the methods marked *collective* in the same order.

    Without --logical-ranks, each rank is one logical rank.
    """

    def __init__(self, settings: Settings, world: World, task: Task):
        self.settings, self.world, self.task = settings, world, task
        self.num_logical_ranks = settings.logical_ranks or world.size
        torch.manual_seed(settings.seed)  # the same weights on every rank
        self.model = task.build_model().to(world.device)
        self.ddp: Any = wrap(self.model, settings, world)
        self.hook_errors = register_hook(self.ddp, settings)
        torch.manual_seed(settings.seed + 1 + world.rank)  # but not the same dropout
        self.optimizer = make_optimizer(self.model, settings)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
        pin_memory = streams.has_streams(world.device)
        self.batches = Batches(task.training, settings, self.num_logical_ranks, pin_memory)
        self.step = 0  # optimizer steps taken
        self.elapsed_s = 0.0  # by rank 0's clock, as of the last vote
        # Since the last training record
        self.averages = Averages(world.device)
        self.training_s = 0.0
        self.gradient_norm = torch.zeros(())
        self._rehearse()

    def _micro_batches(self) -> Iterable[int]:
        """The logical rank of each pass; with --logical-ranks, DDP decides here which pass communicates."""
        return [self.world.rank] if self.settings.logical_ranks is None else self.ddp.shares()

    def optimizer_step(self) -> None:
        """Run forward and backward for all samples of a step, then update the parameters. Collective."""
        began = time.monotonic()
        passes = self.settings.accumulate
        for i in range(passes):
            for logical_rank in self._micro_batches():
                batch = self.batches.of(logical_rank)
                # Only the last pass communicates. The forward must be inside no_sync, too: there DDP decides
                # whether the coming backward communicates.
                with self.ddp.no_sync() if i < passes - 1 else nullcontext():
                    loss = self._loss(self.ddp, batch, self.averages)
                    self.scaler.scale(loss / passes).backward()
            self.batches.advance()
        self._update()
        self.step += 1
        self.training_s += time.monotonic() - began

    def _update(self) -> None:
        """Clip the averaged gradients and step the optimizer.

        In float16 small gradients underflow to zero. `GradScaler` multiplies the loss, and so all gradients, by a
        scale. It divides the gradients again before clipping, skips the step if one has overflowed, and lowers the
        scale then. Averaged gradients are equal on all ranks, so all ranks skip the same steps.
        """
        done = self.settings.progress(self.step, self.elapsed_s)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.num_logical_ranks, self.step, done)
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.settings.clip_norm is None else self.settings.clip_norm
        self.gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, model: nn.Module, batch: Batch, averages: Averages | None) -> Tensor:
        """The loss of one batch, which is added to `averages`.

        Autocast runs matrix products in 16 bits and keeps parameters, gradients and sums in 32. It covers forward
        and loss; backward uses the same types by itself.
        """
        inputs, targets = (part.to(self.world.device, non_blocking=True) for part in batch)
        dtype = DTYPES[self.settings.precision]
        with torch.autocast(self.world.device.type, dtype, enabled=dtype != torch.float32):
            outputs = model(inputs)
            loss = self.task.loss(outputs, targets)
        if averages is not None:
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
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with random_state_is_kept(self.world.device):
            first, data = self.world.rank * self.settings.batch_size, self.task.training  # others on every rank
            samples = [data[(first + i) % len(data)] for i in range(self.settings.batch_size)]  # type: ignore[arg-type]
            for _ in self._micro_batches():
                self._loss(self.ddp, default_collate(samples), averages=None).backward()
        self.optimizer.zero_grad(set_to_none=True)
        if self.hook_errors is not None:
            self.hook_errors.load_state_dict(self.hook_errors.state_dict() | {"errors": {}})
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self._set_step_of_logical_ranks()

    def _set_step_of_logical_ranks(self) -> None:
        if self.settings.logical_ranks is not None:
            self.ddp.logical_ranks.step = self.step  # random states follow from it

    def state(self) -> State | None:
        """Everything that determines how the run continues, on rank 0; None on other ranks. Collective."""
        if self.settings.zero:
            self.optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
        ours: State = {"random": torch.get_rng_state()}  # of models; samples have random states of their own
        if self.world.device.type != "cpu":
            ours["random_on_device"] = streams.random_state(self.world.device)
        if self.hook_errors is not None:
            ours["hook_errors"] = self.hook_errors.state_dict()
        of_ranks: list[Any] = [None] * self.world.size
        dist.gather_object(ours, of_ranks if self.world.is_main else None, dst=0, group=self.world.control)
        if not self.world.is_main:
            return None
        return {
            "decisive": {name: getattr(self.settings, name) for name in DECISIVE},
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "epoch": self.batches.epoch,
            "samples": self.batches.samples,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "of_ranks": of_ranks if self.settings.logical_ranks is None else [],
        }

    def restore(self, state: State) -> None:
        """Continue from `state`; with the same bits if the number of ranks is the same, or with logical ranks."""
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self.batches.epoch, self.batches.samples = state["epoch"], state["samples"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._set_step_of_logical_ranks()
        if len(state["of_ranks"]) != self.world.size:  # random numbers that the run has not drawn before
            torch.manual_seed(self.settings.seed + 1 + self.world.rank + self.world.size * (1 + self.step))
            return
        ours = state["of_ranks"][self.world.rank]
        torch.set_rng_state(ours["random"])
        if "random_on_device" in ours and self.world.device.type != "cpu":
            streams.set_random_state(ours["random_on_device"], self.world.device)
        if "hook_errors" in ours and self.hook_errors is not None:
            self.hook_errors.load_state_dict(ours["hook_errors"])


def wrap(model: nn.Module, settings: Settings, world: World) -> nn.Module:
    """The data-parallel model. Raises SettingsError for options that it refuses."""
    wrapper, flag = WRAPPERS[settings.ddp], f"--ddp {settings.ddp} --ddp-options"
    options = arguments_for(wrapper, settings.ddp_options, flag)
    if settings.logical_ranks is not None:
        if settings.logical_ranks < world.size:
            raise SettingsError(
                f"--logical-ranks {settings.logical_ranks} is less than the {world.size} ranks; raise it, or start "
                f"fewer ranks."
            )
        options["logical_ranks"] = settings.logical_ranks
    device_ids = [world.device.index] if world.device.type != "cpu" else None
    try:
        return wrapper(model, device_ids=device_ids, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{flag} {' '.join(settings.ddp_options)}: {error}") from error


def register_hook(ddp: Any, settings: Settings) -> ErrorFeedback | None:
    """Register --comm-hook; returns its state if it keeps unsent errors. Collective."""
    if settings.comm_hook in HOOKS:
        make_state, hook = HOOKS[settings.comm_hook]
        state = make_state(ddp.module)
        ddp.register_comm_hook(state, hook)
        return state if isinstance(state, ErrorFeedback) else None
    if settings.comm_hook != "none":
        register_ddp_comm_hook(DDPCommHookType[settings.comm_hook.upper()], ddp, state=None)
    return None
