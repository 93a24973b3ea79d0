"""Torch's rules for the module, its devices and the process group, checked before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _to_kwargs


@dataclass(frozen=True)
class Placement:
    """The devices of a module. `device_ids` has one element, the device to move inputs to, or is `None`."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None

    @classmethod
    def checked(
        cls,
        module: nn.Module,
        ignored: Collection[str],
        device_ids: Sequence[int | torch.device] | None,
        output_device: int | torch.device | None,
    ) -> Placement:
        """The module's placement, if the arguments fit it.

        Raises:
            ValueError: parameters on devices of several types, or arguments that contradict the devices.
        """
        devices = {param.device: None for name, param in module.named_parameters() if name not in ignored}
        if not devices:  # all of them are delayed
            devices = {param.device: None for param in module.parameters()}
        device = next(iter(devices))
        types = {device.type for device in devices}
        if len(types) != 1:
            raise ValueError(
                f"DistributedDataParallel's input module must be on the same type of devices, but input module "
                f"parameters locate in {types}."
            )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids can only be None or contain a single element, but is {list(device_ids)}: "
                f"minddp, as torch, runs one process per device."
            )
        has_no_choice = device.type == "cpu" or not device_ids or len(devices) > 1
        if (device_ids or output_device) and has_no_choice:
            raise ValueError(
                f"DistributedDataParallel device_ids and output_device arguments only work with single-device "
                f"GPU modules, but got device_ids {device_ids}, output_device {output_device}, and module "
                f"parameters {set(devices)}. Leave both out."
            )
        if not device_ids:
            return cls(device, None, None)
        output = device_ids[0] if output_device is None else output_device
        return cls(device, [_index(device_ids[0])], _index(output))

    def move(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move the inputs of a forward to the device in `device_ids`, if there is one."""
        if self.device_ids is None:
            return inputs, kwargs
        device = torch.device(self.device.type, self.device_ids[0])
        moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, copies_on_side_stream())
        return moved_inputs[0], moved_kwargs[0]


def copies_on_side_stream() -> bool:
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"


def resolve_group(
    process_group: dist.ProcessGroup | None, device_mesh: Any, module: nn.Module
) -> dist.ProcessGroup:
    """The ranks to average over. As in torch, a slice of a larger mesh makes the module's DTensors local."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("This rank is not a member of `process_group`; wrap the module on the group's ranks only.")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"`process_group` takes what torch.distributed.new_group returns, but got {process_group!r} "
            f"({type(process_group).__name__}). Name the backend to init_process_group."
        )
    if device_mesh is None:
        return process_group if process_group is not None else _get_default_group()
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def check_module(module: nn.Module, ignored: Collection[str], delayed: Iterable[nn.Parameter]) -> None:
    """Raise `RuntimeError` or `ValueError` if the module cannot be trained data-parallel."""
    named = dict(module.named_parameters())
    lazy = [name for name, param in named.items() if isinstance(param, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: "
            f"{', '.join(lazy)}. Run a dummy forward pass to correctly initialize the modules."
        )
    params = [param for name, param in named.items() if name not in ignored]
    if not any(param.requires_grad for param in params) and not any(True for _ in delayed):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            f"gradient. This one has {len(params)} parameters; call the module itself, or requires_grad_()."
        )
    on_cpu = all(param.device.type == "cpu" for param in named.values())
    synced = [name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)]
    if on_cpu and synced:
        raise ValueError(
            f"SyncBatchNorm layers only work with GPU modules, but {', '.join(synced)} is on the CPU. "
            f"Use BatchNorm there."
        )


def reduced_parameters(module: nn.Module, ignored: Collection[str]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that require grad, in registration order, tied ones once.

    As in torch, a tied parameter is ignored only if all submodules that have it ignore it.
    """
    first_name: dict[nn.Parameter, str] = {}
    for prefix, submodule in module.named_modules():
        for name, param in submodule.named_parameters(prefix, recurse=False):
            if param.requires_grad and name not in ignored:
                first_name.setdefault(param, name)
    return [(name, param) for param, name in first_name.items()]


def sparse_parameters(module: nn.Module) -> set[str]:
    """All names of the parameters of embeddings with sparse=True, whose gradients are sparse."""
    owners: dict[nn.Parameter, nn.Module] = {}
    for child in module.modules():
        for param in child.parameters(recurse=False):
            owners.setdefault(param, child)
    return {
        name
        for name, param in module.named_parameters(remove_duplicate=False)
        if isinstance(owners[param], (nn.Embedding, nn.EmbeddingBag)) and owners[param].sparse
    }


def _index(device: int | torch.device) -> int:
    index = torch.device(device).index if not isinstance(device, int) else device
    return torch.accelerator.current_device_index() if index is None else index
