"""The work of one rank: train a step, validate, and the state to save and restore."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import minddp
from minddp.comm_hooks import HOOKS, ErrorFeedback
from minddp.platform import streams
from minddp.tools.elastic.random_state import random_state_is_kept
from minddp.tools.train.batches import Batch, Batches, Position, validation_batches
from minddp.tools.train.checkpoint import decisive_settings
from minddp.tools.train.metrics import Averages, Means
from minddp.tools.train.optimizer import learning_rate, make_optimizer
from minddp.tools.train.precision import Precision
from minddp.tools.train.settings import Settings, SettingsError, arguments_for
from minddp.tools.train.task import Task, load_task
from minddp.tools.train.world import World

WRAPPERS: dict[str, type[nn.Module]] = {
    "minddp": minddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}


class Trainer:
    """One rank's part of a run. Methods marked *collective* must be called on every rank alike."""

    def __init__(self, settings: Settings, world: World, task: Task | None = None):
        self.settings, self.world = settings, world
        self.task = task or load_task(settings)
        self.num_shares = settings.logical_ranks or world.size
        torch.manual_seed(settings.seed)  # the same weights on every rank
        self.model = self.task.build_model().to(world.device)
        self.precision = Precision(settings, world.device)
        self.ddp: Any = wrap(self.model, settings, world)
        self.hook_errors = register_hook(self.ddp, settings)
        torch.manual_seed(settings.seed + 1 + world.rank)  # but not the same dropout
        self.forward: Any = (
            self.ddp if settings.compile == "no" else torch.compile(self.ddp, backend=settings.compile)
        )
        self.optimizer = make_optimizer(self.model, settings)
        self.batches = Batches(self.task.training, settings, self.num_shares, streams.has_streams(world.device))
        self.averages = Averages(self.num_shares, world.device)
        self.gradient_norm = torch.zeros(())
        self.step = 0  # optimizer steps taken
        self.elapsed_s = 0.0  # on rank 0's clock, as the ranks last agreed
        self.best_loss = float("inf")  # of all validations
        self.flops_per_target = self._rehearse()

    @property
    def shares(self) -> range:
        """The shares of each step that this rank computes."""
        if self.settings.logical_ranks is None:
            return range(self.world.rank, self.world.rank + 1)
        return self.ddp.logical_ranks.here

    def optimizer_step(self) -> None:
        """Forward and backward for all samples of a step, then one step of the optimizer. Collective."""
        passes = self.settings.accumulate
        for i in range(passes):
            # With logical ranks there is one pass for each, and DDP decides which of them communicates.
            for share in self.shares if self.settings.logical_ranks is None else self.ddp.shares():
                batch = self.batches.of_share(share)
                # Gradients of all but the last pass stay here. The forward belongs inside, too: it is there that
                # DDP decides whether the coming backward communicates.
                with self.ddp.no_sync() if i < passes - 1 else nullcontext():
                    loss = self._forward(self.forward, batch, share, self.averages)
                    self.precision.backward(loss / passes)
                if self.settings.survive and share == self.shares[-1]:
                    self.averages.spread()
            self.batches.advance()
        done = self.settings.progress(self.step, self.elapsed_s)
        rate = learning_rate(self.settings, self.num_shares, self.step, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.gradient_norm = self.precision.step(self.optimizer, self.model)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _forward(self, model: nn.Module, batch: Batch, share: int, averages: Averages) -> Tensor:
        """The loss of one batch, counted in `averages`."""
        inputs, targets = (part.to(self.world.device, non_blocking=True) for part in batch)
        with self.precision.autocast():
            outputs = model(inputs)
            loss = self.task.loss(outputs, targets)
        averages.add(share, self.task, loss.detach(), outputs.detach(), targets)
        return loss

    @torch.no_grad()
    def validate(self) -> Means:
        """Averages over the held-out data, dealt to the shares. Collective.

        The model without its wrapper, since shares may differ in length and DDP's forward can be a collective.
        Between two forwards every rank has its own BatchNorm statistics; the validated model is rank 0's.
        """
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        averages = Averages(self.num_shares, self.world.device)
        self.model.eval()
        for share in self.shares:
            for batch in validation_batches(self.task.validation, self.settings, share, self.num_shares):
                self._forward(self.model, batch, share, averages)
        self.model.train()
        return averages.over_ranks()

    def _rehearse(self) -> float:
        """One forward and backward whose results are dropped; returns their FLOPs per target. Collective.

        [Note: rehearsal]
        DDP has a state that no checkpoint holds. Its first backward shows in which order gradients become ready,
        and only then are the buckets made that all later steps use. From three ranks on, the order in which a
        number is summed depends on its place in a bucket: a resumed run would take its first step with other
        roundings than the run that went on. So every run begins with a pass that leaves nothing but those buckets.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with random_state_is_kept(self.world.device), FlopCounterMode(display=False) as counter:
            first, data = self.world.rank * self.settings.batch_size, self.task.training  # others on every rank
            samples = [data[(first + i) % len(data)] for i in range(self.settings.batch_size)]  # type: ignore[arg-type]
            inputs, targets = (part.to(self.world.device) for part in default_collate(samples))
            for _ in range(1) if self.settings.logical_ranks is None else self.ddp.shares():
                with self.precision.autocast():
                    loss = self.task.loss(self.ddp(inputs), targets)
                loss.backward()
        self.optimizer.zero_grad(set_to_none=True)
        if self.hook_errors is not None:
            self.hook_errors.load_state_dict(self.hook_errors.state_dict() | {"errors": {}})
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self._tell_shares_the_step()
        return counter.get_total_flops() / (len(self.shares) * targets.numel())

    def _tell_shares_the_step(self) -> None:
        if self.settings.logical_ranks is not None:
            self.ddp.logical_ranks.step = self.step  # random states follow from it

    def state(self) -> dict[str, Any] | None:
        """What determines how the run continues, with every rank's random state; None on others than 0. Collective.

        Beside it lies what the rank's hook has yet to send. Logical ranks have neither: it follows from the step.
        """
        if self.settings.zero:
            self.optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
        states: list[Any] = [None] * self.world.size
        if self.settings.logical_ranks is None:
            ours: list[Any] = [torch.get_rng_state()]  # all that models draw from; data has states of its own
            if (device := self.world.device).type != "cpu":
                ours.append(streams.random_state(device))
            if self.hook_errors is not None:
                ours.append(self.hook_errors.state_dict())
            dist.gather_object(ours, states if self.world.is_main else None, dst=0, group=self.world.control)
        if not self.world.is_main:
            return None
        return {
            "decisive": decisive_settings(self.settings),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "best_loss": self.best_loss,
            "position": dataclasses.asdict(self.batches.position),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "random_states": states if self.settings.logical_ranks is None else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where it was saved; to the bit, with as many ranks as then, or with logical ranks."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.scaler.load_state_dict(state["scaler"])
        self.batches.position = Position(**state["position"])
        self.step, self.elapsed_s, self.best_loss = state["step"], state["elapsed_s"], state["best_loss"]
        self._tell_shares_the_step()
        if len(state["random_states"]) == self.world.size:
            of_cpu, *others = state["random_states"][self.world.rank]
            torch.set_rng_state(of_cpu)
            if self.hook_errors is not None and others and isinstance(others[-1], dict):
                self.hook_errors.load_state_dict(others.pop())
            if others and self.world.device.type != "cpu":
                streams.set_random_state(others[0], self.world.device)
        else:  # other random numbers, and not again those that the run began with
            torch.manual_seed(self.settings.seed + 1 + self.world.rank + self.world.size * (1 + self.step))


def wrapper_options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments for the wrapper. Raises SettingsError if it does not have them."""
    options = arguments_for(WRAPPERS[settings.ddp], settings.ddp_options, f"--ddp {settings.ddp} --ddp-options")
    if settings.logical_ranks is not None:
        options["logical_ranks"] = settings.logical_ranks
    return options


def wrap(model: nn.Module, settings: Settings, world: World) -> nn.Module:
    """The model, made data-parallel. Raises SettingsError for options that exclude each other."""
    device_ids = [world.device.index] if world.device.type != "cpu" else None
    try:
        return WRAPPERS[settings.ddp](model, device_ids=device_ids, **wrapper_options(settings))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"--ddp-options {' '.join(settings.ddp_options)}: {error}") from error


def register_hook(ddp: Any, settings: Settings) -> ErrorFeedback | None:
    """Register `--comm-hook`; returns what it has yet to send. Collective."""
    if settings.comm_hook in HOOKS:
        make_state, hook = HOOKS[settings.comm_hook]
        state = make_state(ddp.module)
        ddp.register_comm_hook(state, hook)
        return state if isinstance(state, ErrorFeedback) else None
    if settings.comm_hook != "none":
        register_ddp_comm_hook(DDPCommHookType[settings.comm_hook.upper()], ddp, state=None)
    return None
