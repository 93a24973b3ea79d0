"""Broadcasting one rank's optimizer state to all, for instance after that rank alone has loaded a checkpoint.

First the ranks compare their parameter groups, so that all of them raise if they differ. Then the source sends its
state in the format of `torch.save`. (`load_state_dict` would cast it to the dtypes of the parameters, and so change
bits.)
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from minddp.replicas.agreement import Replica, verify_replicas_agree
from minddp.transport.protocols import Transport

Optimizer = torch.optim.Optimizer
Params = Sequence[torch.nn.Parameter]


def check_optimizer(optimizer: object) -> None:
    """Raise unless `optimizer` is one whose state can be broadcast."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer` takes a torch.optim.Optimizer, but got {type(optimizer).__name__}.")
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        raise ValueError(
            "A ZeroRedundancyOptimizer cannot be synchronised: each rank holds a different part of the state. Call "
            "its load_state_dict on every rank, with the result of consolidate_state_dict."
        )


def broadcast_optimizer_state(
    transport: Transport, group: dist.ProcessGroup, optimizer: Optimizer, params: Params, source: int
) -> None:
    """Overwrite state and hyperparameters on every rank with those of rank `source`. Collective.

    `params` have the same order on all ranks. The state of other parameters is not changed.

    Raises:
        RuntimeError: the ranks' parameter groups differ, or some state cannot be sent. On every rank.
    """
    _verify_optimizers_agree(transport, optimizer, params)
    message: list[Any] = [None]
    if transport.rank == source:
        try:
            message[0] = (_devices_of(params), _saved(optimizer, params))
        except Exception as error:  # the other ranks wait for a message
            message[0] = f"Rank {source} cannot send the state of its {type(optimizer).__name__}: {error}"
    dist.broadcast_object_list(message, group=group, group_src=source)
    if isinstance(message[0], str):
        raise RuntimeError(message[0])
    if transport.rank != source:
        devices, saved = message[0]
        moved = dict(zip(devices, _devices_of(params), strict=True))
        _load(torch.load(io.BytesIO(saved), moved, weights_only=False), optimizer, params)


def _verify_optimizers_agree(transport: Transport, optimizer: Optimizer, params: Params) -> None:
    """Parameters that are not in `params` only have to be equally many."""
    place = {param: index for index, param in enumerate(params)}
    places = [[place.get(param) for param in group["params"]] for group in optimizer.param_groups]
    sizes = ", ".join(str(len(group)) for group in places)
    options = {
        "optimizer": f"{type(optimizer).__name__} with groups of {sizes} parameters",
        "the hash of their order": zlib.crc32(repr(places).encode()),
    }
    verify_replicas_agree(transport, Replica([], options=options), params[0].device)


def _saved(optimizer: Optimizer, params: Params) -> bytes:
    """The state of `params` in their order, the state under other keys, and the hyperparameters of each group."""
    of_params = [optimizer.state.get(param) for param in params]
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    groups = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    state = (of_params, others, groups)
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"it holds a {type(leaf).__name__}, and only plain tensors can be broadcast.")
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _load(state: Any, optimizer: Optimizer, params: Params) -> None:
    of_params, others, groups = state
    known = set(params)
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor) or key in known]:
        del optimizer.state[key]
    optimizer.state.update(others)
    optimizer.state.update((param, of) for param, of in zip(params, of_params, strict=True) if of is not None)
    for group, sent in zip(optimizer.param_groups, groups, strict=True):
        own = group["params"]
        group.clear()
        group.update(sent, params=own)


def _devices_of(params: Params) -> list[str]:
    return list(dict.fromkeys(str(param.device) for param in params))
