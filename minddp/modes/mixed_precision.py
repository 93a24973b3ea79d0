"""Low-precision compute: torch's `mixed_precision=_MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)`.

Optimizers and checkpoints see full precision. Buffers are cast once, at construction.

    forward            param.data becomes a copy in param_dtype; inputs and existing gradients are cast, too
    backward           gradients arrive in param_dtype and are packed into buckets of reduce_dtype
                       all-reduce, then divide by the world size
    end of backward    param.data is the original again; gradients are cast back, and receive the averages

A parameter whose dtype changes gets a new accumulator, so hooks are installed again (`GradientHooks.renew`).
Autograd saves the parameter, not its data. So a backward after `restore` lowers the parameters again.

Errors of torch 2.13 are not reproduced: its first backward, and the second of a static graph, reduce uninitialised
memory; with gradient_as_bucket_view all backwards from the third on repeat the averages of the second;
`find_unused_parameters`, tied parameters, `no_sync` and evaluation raise; counts in buffers are cast, too.
With gradient_as_bucket_view `.grad` still has memory of its own, because its dtype is not the bucket's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _cast_forward_inputs

from minddp.core import autograd
from minddp.core.mode import Mode


class MixedPrecision(Mode):
    """Lowers and restores the floating-point parameters of `module`, except those named in `ignored`.

    As in torch, a parameter's `_fp_param` is its data in full precision, and `_mp_param` the copy, or empty.

    Raises:
        TypeError: `config` has not the fields of torch's `_MixedPrecision`, or a dtype that is not floating-point.
        ValueError: trainable parameters cannot be cast, or their gradients.
    """

    def __init__(self, config: Any, module: nn.Module, ignored: Collection[str], sparse: Collection[str]):
        _check_config(config)
        _check_params(module, ignored, sparse)
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.buffer_dtype: torch.dtype | None = config.buffer_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        self._is_lowered = False
        self._awaits_backward = False  # the parameters stay lowered until it ends
        self._versions: dict[str, int] = {}  # of the parameters, when they were lowered
        self._params: dict[str, Any] = {
            name: param
            for name, param in module.named_parameters()
            if name not in ignored and param.is_floating_point() and self.param_dtype not in (None, param.dtype)
        }
        for param in self._params.values():
            self._keep(param, param.data, None)

    def cast_buffers(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Once, at construction."""
        for name, buffer in module.named_buffers():
            if self.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self.buffer_dtype)

    # ------------------------------------------------------------------ around forward

    def begin_forward(self, inputs: Any, kwargs: Any, on_new_accumulators: Callable[[], None]) -> tuple[Any, Any]:
        """Lower the parameters, existing gradients, and the floating-point tensors among the arguments."""
        has_lowered = self._lower()
        if torch.is_grad_enabled():
            _cast_grads(self._params.values())
            if has_lowered:
                on_new_accumulators()
        return _cast_forward_inputs(self.param_dtype, *inputs, **kwargs)

    def end_forward(self, output: Any) -> None:
        """Keep the parameters lowered until the backward of `output` ends, or restore them if there is none."""
        if torch.is_grad_enabled():
            self._awaits_backward = True
            autograd.call_when_gradient_enters(output, self._on_backward)
        elif not self._awaits_backward:
            self.restore()

    def _lower(self) -> bool:
        """Replace the parameters' data by low-precision copies. False if they are lowered already."""
        if self._awaits_backward or not self._params:
            return False
        self.restore()  # an exception may have cut the last forward short
        originals = [param.data for param in self._params.values()]
        copies = _cast(originals, [self.param_dtype] * len(originals))
        for param, original, low in zip(self._params.values(), originals, copies, strict=True):
            self._keep(param, original, low)
            param.data = low
        self._versions = {name: param._version for name, param in self._params.items()}
        self._is_lowered = True
        return True

    # ------------------------------------------------------------------ around backward

    def restore(self) -> None:
        """Restore full precision for parameters and gradients.

        Raises:
            RuntimeError: a parameter was written to while it was lowered, so the new value is lost.
        """
        if not self._is_lowered:
            return
        written = [name for name, param in self._params.items() if param._version != self._versions[name]]
        for param in self._params.values():
            param.data = param._fp_param
            self._keep(param, param._fp_param, None)
        _cast_grads(self._params.values())
        self._is_lowered = self._awaits_backward = False
        if written:
            raise RuntimeError(
                f"Parameters were written to between a forward and the end of its backward, while mixed_precision "
                f"had replaced them by copies in {self.param_dtype}, so the new values are lost: "
                f"{', '.join(written)}. Load checkpoints and step optimizers after backward; evaluate under "
                f"torch.no_grad()."
            )

    before_unpack = restore

    def _on_backward(self, _unreached: set[int], _place: int | None) -> None:
        self._lower()
        _cast_grads(self._params.values())
        autograd.call_at_end_of_backward(self.restore, on_failure=self.restore)

    def _keep(self, param: Any, original: torch.Tensor, low: torch.Tensor | None) -> None:
        param._fp_param = original
        param._mp_param = original.new_empty(0, dtype=self.param_dtype) if low is None else low


def _cast(tensors: list[torch.Tensor], dtypes: list[torch.dtype | None]) -> list[torch.Tensor]:
    """Copies in other dtypes, with the same strides, made by one kernel on a GPU."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(copies, tensors)
    return copies


def _cast_grads(params: Iterable[Any]) -> None:
    """Cast gradients, in place, to the dtype of their parameters."""
    others = [param for param in params if param.grad is not None and param.grad.dtype != param.dtype]
    if others:
        casts = _cast([param.grad for param in others], [param.dtype for param in others])
        for param, cast in zip(others, casts, strict=True):
            param.grad.data = cast


def _check_config(config: Any) -> None:
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        if not hasattr(config, field):
            raise TypeError(
                f"`mixed_precision` takes torch's _MixedPrecision(param_dtype, reduce_dtype, buffer_dtype), but "
                f"got {config!r}, which has no `{field}`."
            )
        dtype = getattr(config, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"`{field}` of `mixed_precision` must be a floating-point dtype, but is {dtype!r}.")


def _check_params(module: nn.Module, ignored: Collection[str], sparse: Collection[str]) -> None:
    trainable = {
        name: param for name, param in module.named_parameters() if param.requires_grad and name not in ignored
    }
    for reason, names in (
        ("complex numbers cannot be cast", [name for name, param in trainable.items() if param.is_complex()]),
        ("sparse gradients are not cast (build the embedding with sparse=False)", trainable.keys() & sparse),
        (
            "tensor parallelism computes with a DTensor that would keep an old copy of the parameter",
            [name for name, param in trainable.items() if hasattr(param, "_st_info")],
        ),
    ):
        if names:
            raise ValueError(f"`mixed_precision` is not possible for {', '.join(sorted(names))}: {reason}.")
