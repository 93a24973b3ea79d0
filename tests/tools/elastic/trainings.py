"""Small trainings with logical ranks, drawn from a seed, whose every bit is reported."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import minddp
from tests.parity.layers import LAYERS, WIDTH, Batch
from tests.parity.network import Network

STEPS = 5
LEAVES_OUT = ("unused", "branch by rank", "branch by turn", "branch by input", "undefined")


@dataclass(frozen=True)
class Training:
    """`wrapper` are options of the wrapper beside `logical_ranks`, the number of shares."""

    seed: int
    layers: tuple[str, ...] = ("large", "norm", "dropout", "conv")
    frozen: tuple[str, ...] = ()
    shares: int = 8
    optimizer: str = "AdamW"
    wrapper: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    clears_to_none: bool = True

    @classmethod
    def drawn(cls, seed: int) -> Training:
        rng = random.Random(seed)
        finds_unused = rng.random() < 0.4
        # A reentrant checkpoint of the inputs brings no gradient, in native DDP neither.
        kinds = sorted(set(LAYERS) - {"reentrant", "sparse"} - (set() if finds_unused else set(LEAVES_OUT)))
        layers = tuple(rng.choices(kinds, k=rng.randint(2, 6)))
        wrapper = {
            "find_unused_parameters": finds_unused,
            "gradient_as_bucket_view": rng.random() < 0.5,
            "bucket_cap_mb": rng.choice([None, 0.001, 0.01, 0.03, 25]),
            "lazy_bucket_allocation": rng.random() < 0.2,
        }
        return cls(
            seed,
            layers,
            frozen=tuple(rng.choice(["", "", "", ":first", ":all"]) for _ in layers),
            shares=rng.choice([4, 5, 6, 7, 8, 8]),
            optimizer=rng.choice(["SGD", "AdamW"]),
            wrapper=wrapper,
            autocast=rng.random() < 0.2,
            clears_to_none=rng.random() < 0.7,
        )

    def model(self) -> Network:
        torch.manual_seed(self.seed)
        frozen = self.frozen or ("",) * len(self.layers)
        return Network([kind + which for kind, which in zip(self.layers, frozen, strict=True)])

    def batches(self, step: int) -> list[Batch]:
        """One for each share. Shares differ in size."""
        rng = torch.Generator().manual_seed(1000 * self.seed + step)
        sizes = [3 + share % 2 for share in range(self.shares)]
        return [
            Batch(torch.randn(n, WIDTH, generator=rng), torch.randint(40, (n,), generator=rng), share, step)
            for share, n in enumerate(sizes)
        ]


def optimizer_of(training: Training, params: Any) -> torch.optim.Optimizer:
    if training.optimizer == "SGD":
        return torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(params, 0.01)


def run(rank: int, training: Training, transport: str = "auto") -> dict[str, str]:
    """Train; digests of all that may depend on how shares are dealt. Losses are those of this rank's shares."""
    model = training.model()
    ddp = minddp.DistributedDataParallel(
        model, logical_ranks=training.shares, transport=transport, **training.wrapper
    )
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer_of(training, params)
    found: dict[str, str] = {}
    for step in range(STEPS):
        batches = training.batches(step)
        for share in ddp.shares():
            with torch.autocast("cpu", torch.bfloat16, enabled=training.autocast):
                loss = ddp(batches[share]).float().square().mean()
            loss.backward()
            found[f"loss of share {share} in step {step}"] = digest([loss.detach()])
        found[f"gradients of step {step}"] = digest([param.grad for param in params])
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=training.clears_to_none)
        found[f"state after step {step}"] = digest(list(model.state_dict().values()))
    states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    found["optimizer"] = digest(states)
    return found


def digest(values: list[Any]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, torch.Tensor):
            hashed.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()


def merged(reports: list[dict[str, str]]) -> dict[str, str]:
    """The reports of all ranks; what several have must be equal."""
    together: dict[str, str] = {}
    for rank, report in enumerate(reports):
        for name, value in report.items():
            assert together.setdefault(name, value) == value, f"rank {rank} has another {name}"
    return together
