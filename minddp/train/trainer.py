"""The work of one rank: train a step, validate, save, restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from minddp.train.batches import Batch, BatchStream, validation_batches
from minddp.train.checkpoint import Checkpoint, decisive_settings, random_state, set_random_state
from minddp.train.metrics import Averages, Means
from minddp.train.schedule import learning_rate, progress
from minddp.train.settings import Settings
from minddp.train.tasks import cross_entropy, load_task
from minddp.train.world import World
from minddp.train.wrap import accumulating, wrap


class Trainer:
    """One rank's part of a run. Methods marked *collective* must be called on every rank alike."""

    def __init__(self, settings: Settings, world: World):
        self.settings, self.world = settings, world
        self.task = load_task(settings)
        torch.manual_seed(settings.seed)  # the same weights on every rank
        self.model = self.task.build_model().to(world.device)
        self.ddp = wrap(self.model, settings, world)
        torch.manual_seed(settings.seed + 1 + world.rank)  # but not the same dropout
        self.optimizer = make_optimizer(self.model, settings)
        self.batches = BatchStream(
            self.task.training,
            settings.batch_size,
            world.rank,
            world.size,
            settings.seed,
            pin_memory=world.device.type == "cuda",
        )
        self.averages = Averages(world.device)
        self.gradient_norm = torch.zeros(())
        self.step = 0  # optimizer steps taken
        self.elapsed_s = 0.0  # on rank 0's clock, as the ranks last agreed

    @property
    def progress(self) -> float:
        return progress(self.settings, self.step, self.elapsed_s)

    def optimizer_step(self, batches: Iterator[Batch]) -> Tensor:
        """Forward and backward `accumulate` times, then one step of the optimizer. Collective.

        Returns this rank's mean loss, a scalar that still lies on the device.
        """
        rate = learning_rate(self.settings, self.world.size, self.step, self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        passes = self.settings.accumulate
        losses = [self._forward_backward(next(batches), is_last=i == passes - 1) for i in range(passes)]
        # After the all-reduce: every rank clips the averaged gradient, by the same norm.
        self.gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.stack(losses).mean()

    def _forward_backward(self, batch: Batch, is_last: bool) -> Tensor:
        """Add one batch's gradient, averaged over ranks once the last of the step has been added."""
        inputs, targets = (part.to(self.world.device, non_blocking=True) for part in batch)
        with accumulating(self.ddp, keep_local=not is_last):
            logits = self.ddp(inputs)
            loss = cross_entropy(logits, targets)
            (loss / self.settings.accumulate).backward()
        self.averages.add(loss.detach(), logits, targets)
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> Means:
        """Averages over the held-out data, shared among the ranks. Collective.

        The model without its wrapper, since shares may differ in length and DDP's forward can be a collective.
        Between two forwards every rank has its own BatchNorm statistics; the validated model is rank 0's.
        """
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        settings, averages = self.settings, Averages(self.world.device)
        share = validation_batches(
            self.task.validation,
            settings.validation_samples,
            4 * settings.batch_size,  # there is room: no activations are kept for a backward
            self.world.rank,
            self.world.size,
        )
        self.model.eval()
        for batch in share:
            inputs, targets = (part.to(self.world.device, non_blocking=True) for part in batch)
            logits = self.model(inputs)
            averages.add(cross_entropy(logits, targets), logits, targets)
        self.model.train()
        return averages.over_ranks()

    def save(self, path: Path) -> None:
        """Rank 0 writes the checkpoint, with every rank's random state. Collective."""
        ours = random_state(self.world.device)
        states = [ours] * self.world.size if self.world.is_main else None
        dist.gather_object(ours, states, dst=0, group=self.world.control)
        if states is not None:
            Checkpoint(
                decisive_settings(self.settings),
                self.step,
                self.elapsed_s,
                self.batches.position,
                self.model.state_dict(),
                self.optimizer.state_dict(),
                states,
            ).save(path)

    def restore(self, path: Path) -> None:
        """Continue where `path` was saved, to the bit. Collective.

        [Note: rehearsal]
        DDP has a state that no checkpoint holds. Its first backward shows in which order gradients become
        ready, and only then are the buckets made that all later steps use. From three ranks on, the order in
        which a number is summed depends on its place in a bucket: a resumed run would take its first step
        with other roundings than the run that went on. So it rehearses one backward pass before it loads the
        checkpoint, which overwrites all that the rehearsal changed.
        """
        inputs, targets = default_collate([self.task.training[i] for i in range(self.settings.batch_size)])
        logits = self.ddp(inputs.to(self.world.device))
        cross_entropy(logits, targets.to(self.world.device)).backward()
        self.optimizer.zero_grad(set_to_none=True)

        checkpoint = Checkpoint.load(path)
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.batches.position = checkpoint.position
        self.step, self.elapsed_s = checkpoint.step, checkpoint.elapsed_s
        set_random_state(checkpoint.random_states[self.world.rank], self.world.device)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; weight decay only for matrices: it makes no sense for biases and scales."""
    parameters = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # A function of the step sets the rate; see schedule.py.
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
