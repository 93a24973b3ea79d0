"""Packing: gradients are scaled and copied into their bucket, a group at a time.

[Note: the mean is taken first]
The gradients are divided *before* they are summed over the ranks: each rank scales its own while packing. This
keeps sums in range for half precision, and it decides bits, so minddp scales exactly as torch does:
  - a gradient is multiplied by 1/world_size;
  - with gradient_as_bucket_view, one that is already in the buffer is truly divided by world_size;
  - with batched_grad_copy all are truly divided;
  - with a communication hook nothing is scaled: the hook owns the arithmetic.
If the world size is not a power of two, a multiplication and a division differ in the last bit.

[Note: pack groups]
Packing a whole bucket at once would keep the memory of all its gradients until then, and the first ones would have
left the cache. Packing each small gradient by itself would take one call each. So a large gradient is packed when
it arrives, scaled while it is copied. Small ones form *pack groups*, even if large ones are between them, and are
packed when the last of a group has arrived. On a GPU every call is a kernel launch: there only gradients whose
memory is worth releasing early are packed alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minddp.core.plan import BucketPlan, BucketSpec
from minddp.platform import streams

LARGE_BYTES = 64 * 1024  # a gradient of this size or more is a group by itself
LARGE_BYTES_ON_GPU = 1024 * 1024
GROUP_BYTES = 512 * 1024  # with the same part of the buffer, half of a 2 MiB second-level cache

grad_of = operator.attrgetter("grad")


class Scaling(NamedTuple):
    """How packing scales. See [Note: the mean is taken first].

    `divisor` is usually the world size; `None` leaves gradients as they are. Gradients are multiplied by its
    inverse. `divide_resident` truly divides those that already lie in the bucket, `divide_all` every one, and
    complex numbers as pairs of real ones, which rounds differently.
    """

    divisor: float | None = None
    divide_resident: bool = False
    divide_all: bool = False

    @property
    def factor(self) -> float | None:
        """The factor to multiply a gradient by while it is copied; `None` if it must not be multiplied."""
        return None if self.divisor is None or self.divide_all else 1.0 / self.divisor

    def apply(self, tensor: torch.Tensor, *, resident: bool) -> None:
        if self.divisor is None:
            return
        if self.divide_all and tensor.is_complex():
            torch.view_as_real(tensor).div_(self.divisor)
        elif self.divide_all or (resident and self.divide_resident):
            tensor.div_(self.divisor)
        else:
            tensor.mul_(1.0 / self.divisor)

    def undo(self, tensor: torch.Tensor) -> None:
        """The inverse of `apply`, except for rounding. Gradients divided by infinity stay zero."""
        if self.divisor is not None and self.divisor != math.inf:
            tensor.mul_(self.divisor)


class PackGroup:
    """Slots of one bucket that are packed together. See [Note: pack groups].

    `views[k]` is the tensor over the k-th slot, and `flat` the group's part of the bucket's buffer; `None` if other
    slots are in between. `names[k]` is the parameter's name. `grad_dtype` is the dtype of the gradients; copying
    converts them to the buffer's. `binds`: packing makes `.grad` the view (gradient_as_bucket_view).
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        flat: torch.Tensor | None,
        views: list[torch.Tensor],
        grad_dtype: torch.dtype,
        *,
        binds: bool,
    ):
        self.params = params
        self.names = names
        self.flat = flat
        self.views = views
        self.binds = binds
        self._dtypes = [grad_dtype] * len(views)
        self._addresses = [view.data_ptr() for view in views]
        self._layout_is_checked = False

    def pack(self, scaling: Scaling) -> None:
        """Fill this part of the buffer with this rank's gradients, scaled. A missing gradient counts as zero."""
        grads = list(map(grad_of, self.params))
        all_there = self._check(grads)
        # A gradient may be in the buffer although none was there when backward began: a hook can restore one.
        addresses = map(torch.Tensor.data_ptr, grads) if self.binds and all_there else ()
        if self.binds and all(map(operator.is_, grads, self.views)):
            self._scale(scaling, resident=True)
        elif not all_there or any(map(operator.eq, addresses, self._addresses)):
            self._copy_some(grads, scaling)
        else:
            self._copy_all(grads, scaling)
        if self.binds:
            for param, grad, view in zip(self.params, grads, self.views, strict=True):
                if grad is not None and grad is not view:
                    param.grad = view

    def _copy_all(self, grads: list[torch.Tensor], scaling: Scaling) -> None:
        """The common case: every gradient exists and none is in the buffer."""
        if len(grads) == 1 and (factor := scaling.factor) is not None:
            torch.mul(grads[0], factor, out=self.views[0])
        else:
            torch._foreach_copy_(self.views, grads)
            self._scale(scaling, resident=False)

    def _copy_some(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        for grad, view in zip(grads, self.views, strict=True):
            if grad is None:
                view.zero_()
            elif self.binds and lies_at(grad, view):
                if grad.stride() != view.stride():
                    view.copy_(grad.clone())
                scaling.apply(view, resident=True)
            else:
                view.copy_(grad)
                scaling.apply(view, resident=False)

    def _scale(self, scaling: Scaling, *, resident: bool) -> None:
        for part in self.parts():
            scaling.apply(part, resident=resident)

    def parts(self) -> list[torch.Tensor]:
        return self.views if self.flat is None else [self.flat]

    def _check(self, grads: Sequence[Any]) -> bool:
        """True if all gradients exist. A wrong dtype is an error, and a wrong layout in the first backward."""
        try:
            if self._layout_is_checked and [grad.dtype for grad in grads] == self._dtypes:
                return True
        except AttributeError:  # one is `None`
            pass
        for name, grad, view, dtype in zip(self.names, grads, self.views, self._dtypes, strict=True):
            if grad is not None:
                _check_gradient(name, grad, view, dtype)
        self._layout_is_checked = True
        return not any(grad is None for grad in grads)


def lies_at(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """True if the gradient is in the buffer already, even as a different object or in another layout."""
    return grad.data_ptr() == view.data_ptr() and grad.numel() > 0


def _check_gradient(name: str, grad: torch.Tensor, view: torch.Tensor, dtype: torch.dtype) -> None:
    if grad.layout != view.layout:
        raise RuntimeError(
            f"Expected a dense gradient of `{name}`, got {grad.layout}. Sparse ones are only expected for "
            f"weights of nn.Embedding and nn.EmbeddingBag with sparse=True."
        )
    if grad.dtype != dtype:
        raise RuntimeError(
            f"Expected {dtype}, got {grad.dtype} as the gradient of `{name}`. "
            f"Convert the module's dtype before wrapping it, not after."
        )


class PackGroups(NamedTuple):
    """The pack groups of a plan, numbered through all buckets. See [Note: pack groups]."""

    places: list[tuple[int, int]]  # the bucket of each group, and the group's number in it
    members: list[list[int]]  # the parameters of each group
    per_bucket: list[int]  # the number of groups
    of_param: dict[int, int]

    @classmethod
    def of(cls, plan: BucketPlan) -> PackGroups:
        places: list[tuple[int, int]] = []
        members: list[list[int]] = []
        for spec in plan.buckets:
            for number, slots in enumerate(places_by_group(spec)):
                places.append((spec.index, number))
                members.append([spec.slots[slot].param for slot in slots])
        per_bucket = [len(places_by_group(spec)) for spec in plan.buckets]
        return cls(places, members, per_bucket, {p: group for group, params in enumerate(members) for p in params})


def places_by_group(spec: BucketSpec) -> list[list[int]]:
    """The slots of each pack group, as places in the bucket. See [Note: pack groups]."""
    launches = streams.has_streams(spec.device)
    large_bytes = LARGE_BYTES_ON_GPU if launches else LARGE_BYTES
    group_bytes = spec.nbytes if launches else GROUP_BYTES
    groups: list[list[int]] = []
    small: list[int] = []
    small_bytes = 0
    for place, slot in enumerate(spec.slots):
        nbytes = slot.numel * spec.dtype.itemsize
        if nbytes >= large_bytes:
            groups.append([place])
            continue
        if not small or small_bytes >= group_bytes:
            small, small_bytes = [], 0
            groups.append(small)
        small.append(place)
        small_bytes += nbytes
    return groups
