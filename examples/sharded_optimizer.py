"""An optimizer of which each rank keeps a part of the state: ZeRO-1 beside any wrapper.

    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)

See `reference/zero1.py`, whose shards these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from reference.flat import pack
from reference.sharding import Shards
from reference.wire import Wire


class ShardedOptimizer(Optimizer):
    """An optimizer for this rank's part of the parameters (`reference/zero1.py`), which cuts through parameters.

    Gradients are averaged already, as in the course. It works with rules that treat each element by itself.
    """

    def __init__(self, params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any):
        self.wire, self.optimizer_cls = Wire(), optimizer_cls
        self.shards: list[tuple[Shards, Optimizer, dict[str, Any]]] = []
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        trainable = [param for param in group["params"] if param.requires_grad]
        for dtype in dict.fromkeys(param.dtype for param in trainable):
            shards = Shards([param for param in trainable if param.dtype is dtype], self.wire)
            self.shards.append((shards, self.optimizer_cls([shards.own], **options_of(group)), group))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for shards, optimizer, group in self.shards:
            whole = torch.zeros_like(shards.whole)
            gradients = pack(shards.params)
            whole[: gradients.numel()] = gradients
            shards.own.grad = shards.parts_of(whole)[self.wire.rank]
            optimizer.param_groups[0].update(options_of(group))  # a scheduler may have changed them
            optimizer.step()
            self.wire.gather(shards.own, shards.parts_of(shards.whole), label="parameters").wait()
        return loss


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
