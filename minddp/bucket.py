"""One bucket: a flat buffer and, for each parameter, a view into it.

Packing copies gradients into the buffer and scales them by 1/world_size, unpacking puts the averages where
the optimizer will look. Both are few calls per bucket, whatever the number of parameters.

[Note: the mean is taken first]
The sum of the ranks is divided *before* it is taken: each rank scales its own gradients while packing. That
keeps sums in range for half precision, and it decides bits, so minddp scales exactly as torch does:
  - a gradient that is copied into the buffer is multiplied by 1/world_size;
  - a gradient that already lies in the buffer (gradient_as_bucket_view), and everything with
    batched_grad_copy, is truly divided by world_size;
  - with a communication hook nothing is scaled: the hook owns the arithmetic.
At world sizes that are no power of two the first two differ in the last bit.

[Note: where a gradient lies]
Without gradient_as_bucket_view `.grad` never shares memory with a bucket. With it, `.grad` *is* the bucket's
view object from the end of the first backward on: autograd then accumulates straight into the buffer, and
neither packing nor unpacking copies. `zero_grad(set_to_none=True)` breaks that bond in every step; the next
packing copies and binds anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from minddp.plan import BucketPlan, BucketSpec, Slot

# A gradient this large is scaled while it is copied: one pass over memory. Smaller ones are copied together
# and scaled together: two passes, but through the cache and with two calls instead of one per gradient.
ONE_PASS_BYTES = 64 * 1024


@dataclass(frozen=True)
class Scaling:
    """How packing scales. See [Note: the mean is taken first].

    `divisor` is the world size, or `None` to leave gradients as they are. `always_divide` asks for a true
    division also where the gradient is copied.
    """

    divisor: int | None
    always_divide: bool = False

    @property
    def factor(self) -> float | None:
        """By what a gradient is multiplied while it is copied; `None` if it is not."""
        return None if self.divisor is None or self.always_divide else 1.0 / self.divisor

    def scale_copied(self, tensor: torch.Tensor) -> None:
        if self.factor is not None:
            tensor.mul_(self.factor)
        elif self.divisor is not None:
            tensor.div_(self.divisor)

    def scale_resident(self, tensor: torch.Tensor) -> None:
        if self.divisor is not None:
            tensor.div_(self.divisor)


class Bucket:
    """A flat buffer, the parameters whose gradients it carries, and a view for each.

    `flat` is one-dimensional, of the spec's numel, dtype and device. `views[k]` has the shape of `params[k]`
    and its strides where those are dense, so that packing never transposes.
    """

    def __init__(
        self,
        spec: BucketSpec,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        grads_are_views: bool,
    ):
        self.spec = spec
        self.params = tuple(params)
        self.names = tuple(names)
        self.grads_are_views = grads_are_views
        self.flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        self.views = self.views_into(self.flat)
        self._large, self._small, self._small_runs = self._by_size()
        self._layout_checked = False
        if grads_are_views:
            self._adopt_existing_grads()

    def views_into(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per-parameter views into any buffer laid out like this bucket's."""
        return tuple(view_of(flat, slot, param) for slot, param in zip(self.spec.slots, self.params, strict=True))

    def pack(self, scaling: Scaling) -> None:
        """Fill the buffer with this rank's gradients, scaled. A missing gradient counts as zero."""
        grads = [param.grad for param in self.params]
        if not self._layout_checked:
            self._check_layout(grads)
        missing = [k for k, grad in enumerate(grads) if grad is None]
        resident = (
            [k for k, grad in enumerate(grads) if self._lies_in_buffer(grad, k)] if self.grads_are_views else []
        )
        if not missing and not resident:
            self._copy_all(cast(list[torch.Tensor], grads), scaling)
        elif len(resident) == len(grads):
            scaling.scale_resident(self.flat)
            return
        else:
            self._copy_some(grads, set(missing), set(resident), scaling)
        if self.grads_are_views:
            for k, grad in enumerate(grads):
                if grad is not None:
                    self.params[k].grad = self.views[k]

    def unpack(self, result: torch.Tensor, keep: Sequence[bool] | None = None) -> None:
        """Put the averages of `result`, laid out like `flat`, into the parameters' gradients.

        `keep[k]` leaves the gradient of parameter k as it is: no rank has used that parameter.
        """
        averages = self.views if result is self.flat else self.views_into(result)
        wanted = [k for k in range(len(self.params)) if keep is None or not keep[k]]
        if self.grads_are_views:
            if result is not self.flat:
                torch._foreach_copy_(self.views, averages)
            for k in wanted:
                self._bind(k)
            return
        grads = [self.params[k].grad for k in wanted]
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(self.params):
            torch._foreach_copy_(present, averages)
            return
        for k, grad in zip(wanted, grads, strict=True):
            if grad is None:
                self.params[k].grad = grad_like(self.params[k], averages[k])
            else:
                grad.copy_(averages[k])

    def _copy_all(self, grads: list[torch.Tensor], scaling: Scaling) -> None:
        """The common case: every gradient is there and none lies in the buffer."""
        if scaling.factor is None:
            torch._foreach_copy_(self.views, grads)
            scaling.scale_copied(self.flat)
            return
        for k in self._large:
            torch.mul(grads[k], scaling.factor, out=self.views[k])
        if self._small:
            torch._foreach_copy_([self.views[k] for k in self._small], [grads[k] for k in self._small])
            for run in self._small_runs:
                run.mul_(scaling.factor)

    def _copy_some(
        self, grads: Sequence[torch.Tensor | None], missing: set[int], resident: set[int], scaling: Scaling
    ) -> None:
        for k, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
            if k in missing:
                view.zero_()
            elif k in resident:
                scaling.scale_resident(view)
            else:
                view.copy_(cast(torch.Tensor, grad))
                scaling.scale_copied(view)

    def _by_size(self) -> tuple[list[int], list[int], list[torch.Tensor]]:
        """Places of large and of small gradients, and the stretches of the buffer that small ones fill."""
        large, small, runs = [], [], []
        start = end = 0
        for k, slot in enumerate(self.spec.slots):
            if slot.numel * self.flat.element_size() >= ONE_PASS_BYTES:
                large.append(k)
                runs.append((start, end))
                start = end = slot.offset + slot.numel
            else:
                small.append(k)
                end = slot.offset + slot.numel
        runs.append((start, end))
        return large, small, [self.flat[start:end] for start, end in runs if end > start]

    def _lies_in_buffer(self, grad: torch.Tensor | None, k: int) -> bool:
        if grad is self.views[k]:
            return True
        return grad is not None and grad.data_ptr() == self.views[k].data_ptr() and grad.numel() > 0

    def _bind(self, k: int) -> None:
        """Let `.grad` be the view. See [Note: where a gradient lies]."""
        grad = self.params[k].grad
        if grad is None:
            self.params[k].grad = self.views[k]
        elif not self._lies_in_buffer(grad, k) and grad.numel() > 0:
            raise RuntimeError(
                f"Detected at least one parameter gradient is not the expected DDP bucket view with "
                f"gradient_as_bucket_view=True: `{self.names[k]}`. Something replaced its .grad during backward "
                f"(another hook on the parameter, perhaps); leave .grad alone until backward returns."
            )

    def _adopt_existing_grads(self) -> None:
        """Move gradients that exist already into the buffer, when buckets are rebuilt."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
                param.grad = view

    def _check_layout(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Once per buffer: gradients of another dtype are an error, of other strides merely slow."""
        for name, grad, view in zip(self.names, grads, self.views, strict=True):
            if grad is None:
                continue
            if grad.dtype != view.dtype:
                raise RuntimeError(
                    f"Expected {view.dtype}, got {grad.dtype} as the gradient of `{name}`. "
                    f"Convert the module's dtype before wrapping it, not after."
                )
            if grad.stride() != view.stride() and grad.numel() > 0:
                warnings.warn(
                    f"Grad strides do not match bucket view strides for `{name}`: {grad.stride()} against "
                    f"{view.stride()} at sizes {tuple(grad.shape)}. The result is right, but copying is slow; "
                    f"give the gradient the parameter's memory format.",
                    stacklevel=2,
                )
        self._layout_checked = True


def view_of(flat: torch.Tensor, slot: Slot, param: torch.Tensor) -> torch.Tensor:
    """The slot's part of `flat` in the parameter's shape, and in its strides where those are dense.

    That is the layout autograd gives gradients: the parameter's own if it is non-overlapping and dense (also
    channels_last or transposed), else row-major.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat.as_strided(param.size(), param.stride(), slot.offset)
    return flat.narrow(0, slot.offset, slot.numel).view(param.size())


def grad_like(param: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """A fresh gradient for a parameter that had none, holding `average`, in autograd's layout."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        fresh = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=param.device)
    else:
        fresh = torch.empty(param.size(), dtype=param.dtype, device=param.device)
    return fresh.copy_(average)


def allocate_buckets(
    plan: BucketPlan, params: Sequence[torch.nn.Parameter], *, grads_are_views: bool
) -> list[Bucket]:
    """The plan's buckets in launch order, with memory of their own."""
    return [
        Bucket(
            spec,
            [params[slot.param] for slot in spec.slots],
            plan.names(spec.index),
            grads_are_views=grads_are_views,
        )
        for spec in plan.buckets
    ]
