"""Thirty small trainings: twenty with one fault at a random place, rebuilt from reports, and ten that are right.

Each is a function of a `Place`. It trains with an audit around it, and returns the kind of the verdict that is due
and the weights of the micro-batches, [observers, ranks, micro-batches], relative to their gradients as backward has
made them; None where they cannot be known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import minddp
from minddp.tools.audit.report import Verdict
from tests.ranks import of_all_ranks

STEPS, WARM_UP, IGNORED = 5, 2, -100


class Place:
    """Where this script's fault is: drawn by its seed, equal on all ranks."""

    def __init__(self, rank: int, seed: int):
        self.rank, self.seed, self.ranks = rank, seed, dist.get_world_size()
        self.dice = random.Random(seed)
        self.own_dice = random.Random(f"{seed}/{rank}")
        self.at_rank = self.dice.randrange(self.ranks)
        self.batches = self.dice.randint(2, 4)
        self.at_batch = self.dice.randrange(self.batches)
        torch.manual_seed(seed)
        width, depth = self.dice.choice([16, 40]), self.dice.randint(1, 3)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), *layers, nn.Linear(width, 7))
        kind = self.dice.choice([torch.optim.SGD, torch.optim.AdamW])
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(1000 * seed + rank)
        self.masks = self.dice.random() < 0.5
        self.clips: list[float] = []  # the factor in each step

    def batch(self, size: int = 6, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x = scale * torch.randn(size, 12, generator=self.data)
        return x, torch.randint(0, 7, (size,), generator=self.data)

    def padded(self) -> tuple[Tensor, Tensor]:
        """A batch. Ranks and micro-batches have different numbers of labels that count."""
        x, y = self.batch(12)
        y[: self.own_dice.randint(1, 3) * (1 + 2 * (self.rank == self.at_rank))] = IGNORED
        return x, y

    def of_tokens(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean over the labels that count: by an ignore index, or by a mask."""
        if not self.masks:
            return cross_entropy(logits, y)
        mask = (y != IGNORED).float()
        return (cross_entropy(logits, y.clamp(min=0), reduction="none") * mask).sum() / mask.sum()

    def loss(self, module: Callable[[Tensor], Tensor] | None = None, **options: Any) -> Tensor:
        x, y = self.batch(**options)
        return cross_entropy((module or self.model)(x), y)

    def backward(self, module: Callable[[Tensor], Tensor] | None = None, **options: Any) -> None:
        """One micro-batch, whose loss is divided by their number."""
        (self.loss(module, **options) / self.batches).backward()

    def backwards(self, module: Callable[[Tensor], Tensor] | None = None, **options: Any) -> None:
        for _ in range(self.batches):
            self.backward(module, **options)

    def undivided(self, module: Callable[[Tensor], Tensor] | None = None) -> None:
        for _ in range(self.batches):
            self.loss(module).backward()

    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.model.parameters() if param.grad is not None]

    def copies(self) -> list[Any]:
        """Of the gradients, or zeros if there are none."""
        return [grad.clone() for grad in self.grads()] or [0.0] * len(list(self.model.parameters()))

    def average(self, divisor: float | None = None, leave_out: int = 0) -> None:
        grads = self.grads()
        for grad in grads[: len(grads) - leave_out]:
            dist.all_reduce(grad)
            grad /= divisor or self.ranks

    def clip(self, limit: float) -> None:
        """Clips this rank's gradient, and notes the factor."""
        norm = float(clip_grad_norm_(self.model.parameters(), limit))
        self.clips.append(min(1.0, limit / (norm + 1e-6)))

    def clipped_weights(self) -> Any:
        """Those of the mean of gradients that each rank has clipped."""
        return self.weights() * np.array(of_all_ranks(self.clips[WARM_UP]))[:, None]

    def train(self, *acts: Callable[[], object], zero_every: int = 1) -> Any:
        """The `acts` of a step compute its gradients."""
        with minddp.audit(optimizer=self.optimizer, model=self.model, warm_up=WARM_UP) as audit:
            for number in range(STEPS):
                if number % zero_every == 0:
                    self.optimizer.zero_grad()
                for act in acts:
                    act()
                self.optimizer.step()
        return audit

    def weights(self, value: float = 1.0) -> Any:
        """Those of the mean, times `value`."""
        return np.full((self.ranks, self.ranks, self.batches), value / self.ranks)

    def own(self) -> Any:
        """1 for the observer's own, 0 for other ranks'."""
        return self.weights() * 0 + np.eye(self.ranks)[:, :, None]


Result = tuple[Any, str, Any]  # the audit, the kind of its verdict, and the weights


# ---------------------------------------------------------------------- twenty faults


def bypassed_wrapper(at: Place) -> Result:
    """The forward runs through the bare module."""
    ddp = minddp.DistributedDataParallel(at.model)
    return at.train(partial(at.backwards, ddp.module)), "not averaged", at.own()


def always_no_sync(at: Place) -> Result:
    """torch's DDP: the last backward is under no_sync, too."""
    ddp = TorchDDP(at.model)

    def step() -> None:
        with ddp.no_sync():
            at.backwards(ddp)

    return at.train(step), "not averaged", at.own()


def lost_by_zero_grad(at: Place) -> Result:
    """zero_grad in the loop over micro-batches: those before are lost."""
    first = max(1, at.at_batch)

    def step() -> None:
        for batch in range(at.batches):
            if batch == first:
                at.optimizer.zero_grad()
            at.backward()
        at.average()

    weights = at.weights()
    weights[:, :, :first] = 0
    return at.train(step), "lost", weights


def lost_on_one_rank(at: Place) -> Result:
    """One rank leaves out one micro-batch's gradient, such as by an exception that is caught."""

    def step() -> None:
        for batch in range(at.batches):
            before = at.copies()
            at.backward()
            if (at.rank, batch) == (at.at_rank, at.at_batch):
                for grad, old in zip(at.grads(), before, strict=True):
                    grad.zero_().add_(old)
        at.average()

    weights = at.weights()
    weights[:, at.at_rank, at.at_batch] = 0
    return at.train(step), "lost", weights


def sum_over_ranks(at: Place) -> Result:
    """An all-reduce without a division."""
    return at.train(at.backwards, partial(at.average, 1)), "scaled", at.weights(at.ranks)


def sum_over_micro_batches(at: Place) -> Result:
    """The loss is not divided by the number of micro-batches."""
    return at.train(partial(at.undivided, TorchDDP(at.model))), "scaled", at.weights()


def divided_by_ranks_twice(at: Place) -> Result:
    """The loss is divided by the number of ranks, and the wrapper takes the mean."""
    ddp, at.batches = minddp.DistributedDataParallel(at.model), 1
    return at.train(lambda: (at.loss(ddp) / at.ranks).backward()), "scaled", at.weights()


def divided_by_micro_batches_twice(at: Place) -> Result:
    """The loss, and then the gradient."""
    average = partial(at.average, at.ranks * at.batches)
    return at.train(at.backwards, average), "scaled", at.weights(1 / at.batches)


def mean_of_means(at: Place) -> Result:
    """Each rank's loss is the mean over its own tokens."""
    ddp, at.batches = TorchDDP(at.model), 1

    def step() -> None:
        x, y = at.padded()
        at.of_tokens(ddp(x), y).backward()

    return at.train(step), "tokens", at.weights()


def mean_of_means_accumulated(at: Place) -> Result:
    """The same over micro-batches: the bug in gradient accumulation of transformers."""

    def step() -> None:
        for _ in range(at.batches):
            x, y = at.padded()
            (at.of_tokens(at.model(x), y) / at.batches).backward()

    return at.train(step, at.average), "tokens", at.weights()


def clipped_before_averaging(at: Place) -> Result:
    """Each rank clips its own gradient."""
    audit = at.train(partial(at.backwards, scale=1.0 + at.rank), partial(at.clip, 0.2), at.average)
    return audit, "clipped early", at.clipped_weights()


def clipped_on_one_rank(at: Place) -> Result:
    """Only one rank's gradient is longer than the limit."""
    at.batches = 1

    def clip() -> None:
        norms = of_all_ranks(float(nn.utils.get_total_norm(at.grads())))
        at.clip(sum(sorted(norms)[-2:]) / 2)  # shorter than one of them

    audit = at.train(partial(at.backward, scale=5.0 if at.rank == at.at_rank else 1.0), clip, at.average)
    return audit, "clipped early", at.clipped_weights()


def zero_grad_forgotten(at: Place) -> Result:
    """In every second step."""
    return at.train(partial(at.backwards, TorchDDP(at.model)), zero_every=10), "earlier", at.weights()


def accumulates_across_a_step(at: Place) -> Result:
    """The gradient that is applied is the one of the step before: an all-reduce that is waited for too late."""
    kept: list[list[Tensor]] = []

    def mix() -> None:
        kept.append(at.copies())
        for grad, old in zip(at.grads(), kept[-2:][0], strict=True):
            grad.copy_(0.5 * (grad + old))

    return at.train(at.backwards, at.average, mix), "earlier", None


def data_of_another_rank(at: Place) -> Result:
    """One rank reads its neighbour's shard."""
    if at.rank == at.at_rank:
        at.data.manual_seed(1000 * at.seed + (at.rank + 1) % at.ranks)
    return at.train(partial(at.backwards, TorchDDP(at.model))), "same data", None


def no_distributed_sampler(at: Place) -> Result:
    """All ranks read the same data."""
    at.data.manual_seed(at.seed)
    return at.train(partial(at.backwards, minddp.DistributedDataParallel(at.model))), "same data", None


def sum_of_sums(at: Place) -> Result:
    """An all-reduce after every micro-batch: sums are summed again."""

    def step() -> None:
        for _ in range(at.batches):
            at.backward()
            at.average(divisor=1)
        for grad in at.grads():
            grad /= at.ranks

    weights = at.weights() * at.ranks ** np.arange(at.batches)[::-1]
    return at.train(step), "unequal", weights


def broadcast_instead(at: Place) -> Result:
    """One rank's gradient for all."""

    def broadcast() -> None:
        for grad in at.grads():
            dist.broadcast(grad, src=at.at_rank)

    weights = at.weights() * 0
    weights[:, at.at_rank] = 1
    return at.train(at.backwards, broadcast), "lost", weights


def some_parameters_left_out(at: Place) -> Result:
    """A bucket that is never sent."""
    average = partial(at.average, leave_out=at.dice.randrange(2, 5))
    return at.train(at.backwards, average), "not averaged", None


def last_micro_batch_only(at: Place) -> Result:
    """The last micro-batch averages only what its own backward adds to `.grad`."""

    def step() -> None:
        for _ in range(at.batches - 1):
            at.backward()
        before = at.copies()
        at.backward()
        for grad, old in zip(at.grads(), before, strict=True):
            grad -= old
        at.average()
        for grad, old in zip(at.grads(), before, strict=True):
            grad += old

    weights = at.own()
    weights[:, :, -1] = 1 / at.ranks
    return at.train(step), "not averaged", weights


# ---------------------------------------------------------------------- ten that are right


def right_torch(at: Place) -> Result:
    at.batches = 1
    return at.train(partial(at.undivided, TorchDDP(at.model))), "right", at.weights()


def right_minddp_no_sync(at: Place) -> Result:
    ddp = minddp.DistributedDataParallel(at.model)

    def step() -> None:
        for batch in range(at.batches):
            with ddp.no_sync() if batch < at.batches - 1 else nullcontext():
                at.backward(ddp)

    return at.train(step), "right", at.weights()


def right_without_no_sync(at: Place) -> Result:
    """torch's DDP averages in each micro-batch: averages of averages, the same mean."""
    ddp = TorchDDP(at.model, gradient_as_bucket_view=True)
    return at.train(partial(at.backwards, ddp)), "right", at.weights()


def right_by_hand(at: Place) -> Result:
    """The gradient is divided, not the loss."""
    average = partial(at.average, at.ranks * at.batches)
    return at.train(at.undivided, average), "right", at.weights(1 / at.batches)


def right_tokens(at: Place) -> Result:
    """Each rank's sum over tokens, times ranks, over the number of all tokens; the wrapper takes the mean."""
    ddp, at.batches = TorchDDP(at.model), 1

    def step() -> None:
        x, y = at.padded()
        tokens = (y != IGNORED).sum()
        dist.all_reduce(tokens)
        (cross_entropy(ddp(x), y, reduction="sum") * at.ranks / tokens).backward()

    return at.train(step), "right", at.weights()


def right_token_means(at: Place) -> Result:
    """Means over tokens, weighted by their number."""

    def step() -> None:
        batches = [at.padded() for _ in range(at.batches)]
        tokens = sum((y != IGNORED).sum() for _, y in batches)
        dist.all_reduce(tokens)
        for x, y in batches:
            (at.of_tokens(at.model(x), y) * (y != IGNORED).sum() / tokens).backward()

    return at.train(step, partial(at.average, 1)), "right", at.weights(at.ranks)


def right_clipped(at: Place) -> Result:
    """Clipped after averaging, and so on all ranks alike."""
    at.batches = 1
    audit = at.train(partial(at.backward, TorchDDP(at.model), scale=2.0), partial(at.clip, 0.05))
    return audit, "clipped", at.clipped_weights()


def right_half_a_square(at: Place) -> Result:
    """A loss with a factor and a penalty of its own."""
    ddp, at.batches = TorchDDP(at.model), 1

    def step() -> None:
        x, _ = at.batch()
        penalty = sum(param.square().sum() for param in at.model.parameters())
        (0.5 * mse_loss(ddp(x), x[:, :7]) + 1e-3 * penalty).backward()

    return at.train(step), "right", at.weights()


def right_scaled_bf16(at: Place) -> Result:
    """Autocast, a GradScaler, and clipping of what it has unscaled."""
    ddp, scaler = minddp.DistributedDataParallel(at.model), torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step() -> None:
        for _ in range(at.batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = at.loss(ddp) / at.batches
            scaler.scale(loss).backward()
        scaler.unscale_(at.optimizer)
        scaler.update()

    return at.train(step), "right", at.weights(2.0**-12)


def right_checkpointed(at: Place) -> Result:
    """Reentrant checkpointing, where backward runs others within itself; a tied weight."""
    at.model[-1] = nn.Linear(at.model[0].out_features, 12, bias=False)
    at.model[-1].weight = nn.Parameter(at.model[0].weight.detach().T.contiguous())
    at.optimizer = torch.optim.SGD(at.model.parameters(), lr=0.01, momentum=0.9)
    head, rest = at.model[0], at.model[1:]

    def step() -> None:
        for _ in range(at.batches):
            x, y = at.batch()
            h = checkpoint(head, x.requires_grad_(), use_reentrant=True)
            (cross_entropy(checkpoint(rest, h, use_reentrant=True), y) / at.batches).backward()
        at.average()

    return at.train(step), "right", at.weights()


SCRIPTS: dict[str, Callable[[Place], Result]] = {
    name: value
    for name, value in globals().items()
    if getattr(value, "__annotations__", {}).get("return") == "Result"
}


class Outcome(NamedTuple):
    """The expected verdict on a script, the actual one, and the largest error of a weight, if known."""

    due: str
    verdict: Verdict
    error: float

    @property
    def is_right(self) -> bool:
        return self.verdict.kind == self.due and self.error < 0.01


def run(rank: int, name: str, seed: int) -> Outcome | None:
    """Run a script on this rank; the outcome on rank 0."""
    audit, due, weights = SCRIPTS[name](Place(rank, seed))
    if rank > 0:
        return None
    step, error = audit.report.steps[0], 0.0
    if weights is not None:
        places = {source[:2]: place for place, source in enumerate(step.sources) if source.ago == 0}
        group = step.groups[0]
        assert len(places) == weights[0].size, "a micro-batch was not seen"
        found = np.stack([group.weights[:, places[at]] for at in sorted(places)], 1).reshape(weights.shape)
        error = float(np.abs(found - weights).max() / np.abs(weights).max())
    return Outcome(due, audit.report.verdicts()[0], error)
