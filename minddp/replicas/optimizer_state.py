"""Broadcasting one rank's optimizer state to all, for instance after that rank alone has loaded a checkpoint.

First the ranks compare their parameter groups, so that all of them raise if they differ. Then the source sends its
state as a pickle, with placeholders for parameters and for tensors on the module's devices. A coalesced broadcast
sends these tensors. (`load_state_dict` would cast them to the dtype of their parameter, and so change bits.)
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minddp.replicas.agreement import Replica, verify_replicas_agree
from minddp.replicas.broadcast import CoalescedBroadcast
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
            message[0], tensors = _pickled(optimizer, params)
            coalesced = CoalescedBroadcast(tensors)
        except Exception as error:  # the other ranks wait for a message
            message[0] = f"Rank {source} cannot send the state of its {type(optimizer).__name__}: {error}"
    dist.broadcast_object_list(message, group=group, group_src=source)
    if isinstance(message[0], str):
        raise RuntimeError(message[0])
    if transport.rank != source:
        coalesced = CoalescedBroadcast(_unpickled(message[0], optimizer, params))
    with torch.no_grad():
        coalesced.broadcast(transport, source)


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


class _Pickler(pickle.Pickler):
    """Collects tensors on the parameters' devices in `tensors`; pickles all else."""

    def __init__(self, file: io.BytesIO, params: Params):
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._place: dict[torch.Tensor, int] = {param: index for index, param in enumerate(params)}
        self._devices = _devices_of(params)
        self._ids: dict[torch.Tensor, tuple[Any, ...]] = {}

    def persistent_id(self, value: Any) -> Any:
        """The index of a parameter, a description of a tensor in `tensors`, or `None` for all else."""
        if not isinstance(value, torch.Tensor) or value.device not in self._devices:
            return None
        if value in self._place:
            return self._place[value]
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"it holds a {type(value).__name__}, and only plain tensors can be broadcast.")
        if value not in self._ids:
            device = self._devices.index(value.device)
            self._ids[value] = (len(self.tensors), value.size(), value.stride(), value.dtype, device)
            self.tensors.append(value.detach())
        return self._ids[value]


class _Unpickler(pickle.Unpickler):
    """Allocates the tensors that `_Pickler` has collected."""

    def __init__(self, pickled: bytes, params: Params):
        super().__init__(io.BytesIO(pickled))
        self.tensors: list[torch.Tensor] = []
        self._params = params
        self._devices = _devices_of(params)

    def persistent_load(self, persistent_id: Any) -> torch.Tensor:
        if isinstance(persistent_id, int):
            return self._params[persistent_id]
        number, size, strides, dtype, device = persistent_id
        if number == len(self.tensors):
            self.tensors.append(torch.empty_strided(size, strides, dtype=dtype, device=self._devices[device]))
        return self.tensors[number]


def _pickled(optimizer: Optimizer, params: Params) -> tuple[bytes, list[torch.Tensor]]:
    """The pickled state, and the tensors that it leaves out."""
    file = io.BytesIO()
    pickler = _Pickler(file, params)
    state = [(key, optimizer.state[key]) for key in _synchronised(optimizer, params)]
    groups = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    pickler.dump((state, groups))
    return file.getvalue(), pickler.tensors


def _unpickled(pickled: bytes, optimizer: Optimizer, params: Params) -> list[torch.Tensor]:
    """Set the optimizer's state to that of the source. Returns its tensors, which are not filled yet."""
    unpickler = _Unpickler(pickled, params)
    state, groups = unpickler.load()
    for key in _synchronised(optimizer, params):
        del optimizer.state[key]
    optimizer.state.update(state)
    for group, sent in zip(optimizer.param_groups, groups, strict=True):
        own = group["params"]
        group.clear()
        group.update(sent, params=own)
    return unpickler.tensors


def _synchronised(optimizer: Optimizer, params: Iterable[torch.nn.Parameter]) -> list[Any]:
    """The keys of the optimizer's state, except parameters that are not in `params`."""
    known = set(params)
    return [key for key in optimizer.state if not isinstance(key, torch.Tensor) or key in known]


def _devices_of(params: Iterable[torch.Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(param.device for param in params))
