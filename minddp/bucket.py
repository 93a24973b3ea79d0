"""One bucket: a flat buffer and, for each parameter, a view into it.

Packing copies gradients into the buffer and scales them by 1/world_size, unpacking puts the averages where
the optimizer will look.

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

[Note: packing in runs]
Packing gradient by gradient costs a call for each; packing a whole bucket at once finds its first gradients
gone from the cache. So a bucket is packed in *runs* of neighbouring slots, each as soon as its last gradient
has arrived: large enough to make the calls few, small enough to be still in the cache. A gradient as large as
a run is one by itself, and is scaled while it is copied, in one pass. On a GPU every call is a kernel launch
and there is no such cache to keep warm: there a bucket is one run.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from minddp import handover
from minddp.plan import BucketPlan, BucketSpec, Slot

RUN_BYTES = 512 * 1024  # a run's gradients and its part of the buffer: half of a 2 MiB second-level cache


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


class Run:
    """Neighbouring slots of a bucket that are packed together. See [Note: packing in runs].

    `first` is the first slot's place in the bucket, `flat` the run's part of the bucket's buffer, and `views[k]`
    the tensor over its k-th slot.
    """

    def __init__(
        self,
        first: int,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        flat: torch.Tensor,
        views: list[torch.Tensor],
    ):
        self.first = first
        self.params = params
        self.names = names
        self.flat = flat
        self.views = views
        self._addresses = [view.data_ptr() if view.numel() else -1 for view in views]
        self._layout_is_checked = False

    def pack(self, scaling: Scaling, *, bind: bool) -> None:
        """Fill this part of the buffer with this rank's gradients, scaled. A missing gradient counts as zero.

        `bind` makes `.grad` the view of what has been copied (gradient_as_bucket_view).
        """
        grads = [param.grad for param in self.params]
        if not self._layout_is_checked:
            self._check_layout(grads)
        num_resident = sum(map(operator.is_, grads, self.views))
        if num_resident == len(grads):
            scaling.apply(self.flat, resident=True)
            return
        if num_resident == 0 and not self._any_missing_or_at_home(grads):
            self._copy_all(cast("list[torch.Tensor]", grads), scaling)
        else:
            self._copy_some(grads, scaling, bind)
        if bind:
            for param, grad, view in zip(self.params, grads, self.views, strict=True):
                if grad is not None:
                    param.grad = view

    def _any_missing_or_at_home(self, grads: Sequence[torch.Tensor | None]) -> bool:
        if any(map(operator.is_, grads, itertools.repeat(None))):
            return True
        addresses = map(torch.Tensor.data_ptr, cast("list[torch.Tensor]", grads))
        return any(map(operator.eq, addresses, self._addresses))

    def _copy_all(self, grads: list[torch.Tensor], scaling: Scaling) -> None:
        """The common case: every gradient is there and none lies in the buffer."""
        if len(grads) == 1 and scaling.factor is not None:
            torch.mul(grads[0], scaling.factor, out=self.views[0])
        else:
            torch._foreach_copy_(self.views, grads)
            scaling.apply(self.flat, resident=False)

    def _copy_some(self, grads: Sequence[torch.Tensor | None], scaling: Scaling, bind: bool) -> None:
        for grad, view in zip(grads, self.views, strict=True):
            if grad is None:
                view.zero_()
            elif grad is view or (bind and _is_missing_or_at_home(grad, view)):
                scaling.apply(view, resident=True)
            else:
                view.copy_(grad)
                scaling.apply(view, resident=False)

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


class Bucket:
    """A flat buffer, the parameters whose gradients it carries, and a view for each.

    `flat` is one-dimensional, of the spec's numel, dtype and device. `views[k]` has the shape of `params[k]`
    and its strides where those are dense, so that packing never transposes. `runs` are what is packed.
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
        self.params = list(params)
        self.names = list(names)
        self.grads_are_views = grads_are_views
        self._unshared = handover.Unshared.measured()
        self._allocate()
        if grads_are_views:
            self._adopt_existing_grads()

    def views_into(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per-parameter tensors over the memory of any buffer laid out like this bucket's."""
        return [view_of(flat, slot, param) for slot, param in zip(self.spec.slots, self.params, strict=True)]

    def begin_pass(self) -> None:
        """Before the first gradient is packed: have memory that nobody else looks at."""
        if self._has_handed_over and self._others_still_look():
            self._allocate()

    def pack(self, run: int, scaling: Scaling) -> None:
        self.runs[run].pack(scaling, bind=self.grads_are_views)

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
        averages = self.views if average is self.flat else self.views_into(average)
        if self.grads_are_views and average is not self.flat:
            torch._foreach_copy_(self.views, averages)
            averages = self.views
        if all(map(operator.is_, [param.grad for param in self.params], averages)):
            return
        wanted = [k for k in range(len(self.params)) if not (untouched and untouched[k])]
        if self.grads_are_views:
            self._bind(wanted)
            return
        if made_now is not None and average is self.flat:
            wanted = self._hand_over(wanted, made_now)
        self._copy_back(wanted, averages)

    # ------------------------------------------------------------------ memory

    def _allocate(self) -> None:
        self.flat = torch.empty(self.spec.numel, dtype=self.spec.dtype, device=self.spec.device)
        self.views = self.views_into(self.flat)
        self.runs = [
            Run(
                start,
                self.params[start:stop],
                self.names[start:stop],
                self.flat[self.spec.slots[start].offset : self._end_of(stop - 1)],
                self.views[start:stop],
            )
            for start, stop in _run_bounds(self.spec)
        ]
        self._references_to_memory = handover.storage_references(self.flat)
        self._references_to_views = handover.references(self.views)
        self._could_be_fresh = [handover.could_be_fresh(view) for view in self.views]
        self._has_handed_over = False

    def _end_of(self, k: int) -> int:
        return self.spec.slots[k].offset + self.spec.slots[k].numel

    def _adopt_existing_grads(self) -> None:
        """Move gradients that exist already into the buffer, when buckets are rebuilt."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
                param.grad = view

    def _hand_over(self, wanted: Sequence[int], made_now: Sequence[bool]) -> list[int]:
        """Make `.grad` the view where nobody can tell; return the others. See [Note: handing gradients over]."""
        counts = handover.references([param.grad for param in self.params])
        candidates = zip(counts, made_now, self._could_be_fresh, strict=True)
        unseen = self._unshared.grad
        going = {k for k, (count, made, fits) in enumerate(candidates) if made and fits and count == unseen}
        for k in going.intersection(wanted):
            self.params[k].grad = self.views[k]
            self._has_handed_over = True
        return [k for k in wanted if k not in going]

    def _others_still_look(self) -> bool:
        """Whether anybody but the parameters refers to gradients that were handed over."""
        if handover.storage_references(self.flat) != self._references_to_memory:
            return True
        counts = handover.references(self.views)
        if counts == self._references_to_views:
            return False  # no view is a gradient any more, and nobody has kept one
        for param, view, count, ours in zip(
            self.params, self.views, counts, self._references_to_views, strict=True
        ):
            in_grad = self._unshared.being_a_grad if param.grad is view else 0
            if count != ours + in_grad:
                return True
        return False

    # ------------------------------------------------------------------ into `.grad`

    def _copy_back(self, wanted: Sequence[int], averages: list[torch.Tensor]) -> None:
        """Write the averages into the gradients that exist, and make those that do not."""
        sources, targets = [], []
        for k in wanted:
            grad = self.params[k].grad
            if grad is None:
                self.params[k].grad = grad_like(self.params[k], averages[k])
            elif grad is not averages[k]:
                sources.append(averages[k])
                targets.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _bind(self, wanted: Sequence[int]) -> None:
        """gradient_as_bucket_view: let `.grad` be the view where it is not yet."""
        for k in wanted:
            param, view, grad = self.params[k], self.views[k], self.params[k].grad
            if grad is view:
                continue
            if grad is not None and not _is_missing_or_at_home(grad, view) and grad.numel() > 0:
                raise RuntimeError(
                    f"Detected at least one parameter gradient is not the expected DDP bucket view with "
                    f"gradient_as_bucket_view=True: `{self.names[k]}`. Something replaced its .grad during "
                    f"backward (another hook on the parameter, perhaps); leave .grad alone until it returns."
                )
            param.grad = view


def _is_missing_or_at_home(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Whether there is no gradient, or it lies in the buffer already, if perhaps as another object."""
    return grad is None or (grad.data_ptr() == view.data_ptr() and grad.numel() > 0)


def _run_bounds(spec: BucketSpec) -> list[tuple[int, int]]:
    """First and last-plus-one slot of each run. See [Note: packing in runs]."""
    if spec.device.type != "cpu":
        return [(0, len(spec.slots))]
    itemsize = spec.dtype.itemsize
    bounds, start, nbytes = [], 0, 0
    for k, slot in enumerate(spec.slots):
        is_large = slot.numel * itemsize >= RUN_BYTES
        if k > start and (is_large or nbytes >= RUN_BYTES):
            bounds.append((start, k))
            start, nbytes = k, 0
        nbytes += slot.numel * itemsize
    return [*bounds, (start, len(spec.slots))]


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
