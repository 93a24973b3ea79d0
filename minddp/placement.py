"""What can be wrapped, and where it may lie: torch's rules, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group


def resolve_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
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
        raise NotImplementedError("minddp does not support a `device_mesh` that is a slice of a larger one yet.")
    return device_mesh.get_group(mesh_dim=0)


def check_parameters(named: dict[str, nn.Parameter], params: Sequence[nn.Parameter]) -> None:
    lazy = [n for n, p in named.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: "
            f"{', '.join(lazy)}. Run a dummy forward pass to correctly initialize the modules."
        )
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            f"gradient. This one has {len(params)} parameters; call the module itself, or requires_grad_()."
        )
    types = {param.device.type for param in params}
    if len(types) != 1:
        raise ValueError(
            f"DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {types}."
        )
    devices = {str(param.device) for param in params}
    if len(devices) != 1:
        raise NotImplementedError(f"minddp does not support modules on several devices yet, got {devices}.")
    complex_names = [n for n, p in named.items() if p.requires_grad and p.is_complex()]
    if complex_names:
        raise NotImplementedError(f"minddp does not support complex parameters yet: {', '.join(complex_names)}.")


def device_index(device: int | torch.device) -> int:
    index = torch.device(device).index if not isinstance(device, int) else device
    return torch.accelerator.currentdevice_index() if index is None else index
