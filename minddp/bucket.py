"""One bucket: a flat buffer and, for each parameter, a view into it.

Packing copies gradients into the buffer and scales them by 1/world_size, unpacking puts the averages where
the optimizer will look. Both are few calls per bucket, whatever the number of parameters.

[Note: the mean is taken first]
The sum of the ranks is divided *before* it is taken: each rank scales its own gradients while packing. That
keeps sums in range for half precision, and it decides bits, so minddp scales exactly as torch does:
  - a gradient is multiplied by 1/world_size;
  - with gradient_as_bucket_view, one that already lies in the buffer is truly divided by world_size;
  - with batched_grad_copy all are truly divided;
  - with a communication hook nothing is scaled: the hook owns the arithmetic.
At world sizes that are no power of two a multiplication and a division differ in the last bit.

[Note: where a gradient lies]
A gradient is *resident* if `.grad` is the bucket's own view object: autograd then accumulates straight into the
buffer, and neither packing nor unpacking copies. With gradient_as_bucket_view every gradient becomes resident
when it is packed; without it, only when that cannot be seen, see [Note: handing gradients over].
`zero_grad(set_to_none=True)` breaks the bond in every step, and the next packing copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from minddp import handover
from minddp.plan import BucketPlan, BucketSpec, Slot

# A gradient this large is scaled while it is copied: one pass over memory. Smaller ones are copied together
# and scaled together: two passes, but through the cache and with two calls instead of one per gradient.
ONE_PASS_BYTES = 64 * 1024


@dataclass(frozen=True)
class Scaling:
    """How packing scales. See [Note: the mean is taken first].

    `divisor` is the world size, or `None` to leave gradients as they are. The other two tell what is truly
    divided rather than multiplied by the inverse.
    """

    divisor: int | None
    divide_copied: bool = False
    divide_resident: bool = False

    @property
    def factor(self) -> float | None:
        """By what a gradient can be multiplied while it is copied; `None` if it must not be."""
        return None if self.divisor is None or self.divide_copied else 1.0 / self.divisor

    def apply(self, tensor: torch.Tensor, *, resident: bool) -> None:
        if self.divisor is None:
            return
        if self.divide_resident if resident else self.divide_copied:
            tensor.div_(self.divisor)
        else:
            tensor.mul_(1.0 / self.divisor)


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
        self._unshared = handover.Unshared.measured()
        self._allocate()
        if grads_are_views:
            self._adopt_existing_grads()

    def views_into(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per-parameter tensors over the memory of any buffer laid out like this bucket's."""
        return tuple(view_of(flat, slot, param) for slot, param in zip(self.spec.slots, self.params, strict=True))

    def pack(self, scaling: Scaling) -> None:
        """Fill the buffer with this rank's gradients, scaled. A missing gradient counts as zero."""
        grads = [param.grad for param in self.params]
        if not self._layout_is_checked:
            self._check_layout(grads)
        if self._has_handed_over and self._others_still_look(grads):
            self._allocate()
        away = [k for k, (grad, view) in enumerate(zip(grads, self.views, strict=True)) if grad is not view]
        if not away:
            scaling.apply(self.flat, resident=True)
            return
        if len(away) == len(grads) and all(self._must_be_copied(grads[k], k) for k in away):
            self._copy_all(cast("list[torch.Tensor]", grads), scaling)
        else:
            self._copy_some(grads, scaling)
        if self.grads_are_views:
            for k in away:
                if grads[k] is not None:
                    self.params[k].grad = self.views[k]

    def unpack(
        self,
        average: torch.Tensor,
        *,
        untouched: Sequence[bool] | None = None,
        made_now: Sequence[bool] | None = None,
    ) -> None:
        """Put `average`, laid out like `flat`, into the parameters' gradients.

        `untouched[k]` leaves the gradient of parameter k as it is: no rank has used that parameter.
        `made_now[k]` says that this backward has made it, so that it may be handed over.
        """
        views = self.views if average is self.flat else self.views_into(average)
        if self.grads_are_views:
            if average is not self.flat:
                torch._foreach_copy_(list(self.views), list(views))
            self._bind(untouched)
            return
        grads = [param.grad for param in self.params]
        if made_now is not None and average is self.flat and self._can_hand_over:
            self._hand_over(grads, made_now, untouched)
            grads = [param.grad for param in self.params]
        copied = [
            k
            for k, (grad, view) in enumerate(zip(grads, views, strict=True))
            if grad is not view and not (untouched and untouched[k])
        ]
        existing = [k for k in copied if grads[k] is not None]
        if existing:
            torch._foreach_copy_([cast(torch.Tensor, grads[k]) for k in existing], [views[k] for k in existing])
        if len(existing) < len(copied):
            for k in copied:
                if grads[k] is None:
                    self.params[k].grad = grad_like(self.params[k], views[k])

    # ------------------------------------------------------------------ memory

    def _allocate(self) -> None:
        self.flat = torch.empty(self.spec.numel, dtype=self.spec.dtype, device=self.spec.device)
        self.views = self.views_into(self.flat)
        self._large, self._small, self._small_runs = self._by_size()
        self._alone = handover.storage_references(self.flat)
        self._can_hand_over = [handover.could_be_fresh(view) for view in self.views]
        self._has_handed_over = False
        self._layout_is_checked = False

    def _adopt_existing_grads(self) -> None:
        """Move gradients that exist already into the buffer, when buckets are rebuilt."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
                param.grad = view

    def _hand_over(
        self,
        grads: Sequence[torch.Tensor | None],
        made_now: Sequence[bool],
        untouched: Sequence[bool] | None,
    ) -> None:
        """See [Note: handing gradients over]."""
        counts = handover.references(cast("Sequence[torch.Tensor]", grads))
        for k, count in enumerate(counts):
            may_go = made_now[k] and self._can_hand_over[k] and not (untouched and untouched[k])
            if may_go and count == self._unshared.grad and grads[k] is not None:
                self.params[k].grad = self.views[k]
                self._has_handed_over = True

    def _others_still_look(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether anybody but the parameters refers to gradients that were handed over."""
        expected = [
            self._unshared.view_in_grad + 1 if grad is view else self._unshared.view
            for grad, view in zip(grads, self.views, strict=True)
        ]
        shared = handover.storage_references(self.flat) != self._alone
        return shared or handover.references(self.views) != expected

    # ------------------------------------------------------------------ copying

    def _copy_all(self, grads: list[torch.Tensor], scaling: Scaling) -> None:
        """The common case: every gradient is there and none lies in the buffer."""
        if scaling.factor is None:
            torch._foreach_copy_(list(self.views), grads)
            scaling.apply(self.flat, resident=False)
            return
        for k in self._large:
            torch.mul(grads[k], scaling.factor, out=self.views[k])
        if self._small:
            torch._foreach_copy_([self.views[k] for k in self._small], [grads[k] for k in self._small])
            for run in self._small_runs:
                run.mul_(scaling.factor)

    def _copy_some(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        for k, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
            if grad is None:
                view.zero_()
            elif self._must_be_copied(grad, k):
                view.copy_(grad)
                scaling.apply(view, resident=False)
            else:
                scaling.apply(view, resident=True)

    def _must_be_copied(self, grad: torch.Tensor | None, k: int) -> bool:
        """False for a missing gradient, and for one that lies in the buffer even if it is another object."""
        if grad is None or grad is self.views[k]:
            return False
        return not self.grads_are_views or grad.numel() == 0 or grad.data_ptr() != self.views[k].data_ptr()

    def _bind(self, untouched: Sequence[bool] | None) -> None:
        """gradient_as_bucket_view: let `.grad` be the view where it is not yet."""
        for k, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is view or (untouched and untouched[k]):
                continue
            if grad is not None and self._must_be_copied(grad, k):
                raise RuntimeError(
                    f"Detected at least one parameter gradient is not the expected DDP bucket view with "
                    f"gradient_as_bucket_view=True: `{self.names[k]}`. Something replaced its .grad during "
                    f"backward (another hook on the parameter, perhaps); leave .grad alone until it returns."
                )
            param.grad = view

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
        self._layout_is_checked = True


def view_of(flat: torch.Tensor, slot: Slot, param: torch.Tensor) -> torch.Tensor:
    """A tensor over the slot's part of `flat`, in the parameter's shape, and in its strides if those are dense.

    That is the layout autograd gives gradients: the parameter's own if it is non-overlapping and dense (also
    channels_last or transposed), else row-major. To autograd it is a tensor, not a view of `flat`: a `.grad`
    that is a view could not be detached in place.
    """
    strides = param.stride() if torch.ops.aten.is_non_overlapping_and_dense(param) else _row_major(param.size())
    place = flat.storage_offset() + slot.offset
    return flat.new_empty(0).set_(flat.untyped_storage(), place, param.size(), strides)


def _row_major(size: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


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
