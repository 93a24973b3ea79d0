"""One bucket: a flat buffer and, for each parameter, a view into it.

Packing (`packing.py`) copies gradients into the buffer and scales them; unpacking puts the averages into `.grad`.

[Note: how averages reach gradients]
`unpack` has four outcomes for a gradient:
  - *resident*: `.grad` is the bucket's own view object. Autograd has accumulated into the buffer, and the average
    is there already. Only with gradient_as_bucket_view.
  - *bound*: `.grad` becomes the view. Only with gradient_as_bucket_view, if it is not the view yet.
  - *aliased*: `.grad` becomes a separate tensor over the bucket's memory, if no other reference could notice. See
    core/gradient_aliasing.py.
  - *copied*: the average is written into the existing `.grad`, or into a new one.
After `zero_grad(set_to_none=True)` autograd allocates new gradients, so packing copies them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from minddp.core.packing import PackGroup, Scaling, grad_of, lies_at, places_by_group
from minddp.core.plan import BucketSpec, Slot
from minddp.platform import streams

if TYPE_CHECKING:
    from minddp.core.gradient_aliasing import BucketAliasing

#: Makes a flat tensor of `numel` elements of a dtype on a device, in memory that suits the transport.
Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


#: Makes a bucket from its spec, its parameters, their names and the strides of their gradients.
MakeBucket = Callable[
    [BucketSpec, list[torch.nn.Parameter], list[str], "list[tuple[int, ...]]", Allocate], "Bucket"
]


class Bucket:
    """A flat buffer, the parameters whose gradients it carries, and a view for each. `params` are in slot order.

    `views[k]` has the shape of `params[k]` and `strides[k]`, equal on all ranks. Where these are also the strides
    of the parameter, packing does not transpose.
    """

    def __init__(
        self,
        spec: BucketSpec,
        params: list[torch.nn.Parameter],
        names: list[str],
        strides: list[tuple[int, ...]],
        allocate: Allocate,
        *,
        grads_are_views: bool = False,
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        make_aliasing: Callable[[Bucket], BucketAliasing] | None = None,
    ):
        self.spec = spec
        self.params = params
        self.names = names
        self.grads_are_views = grads_are_views
        self.grad_dtype = grad_dtype or spec.dtype  # in which gradients arrive
        self.reduce_dtype = reduce_dtype or spec.dtype  # of the buffer
        self._allocate = allocate
        self._make_aliasing = make_aliasing
        self._layouts = [
            torch.empty_strided(param.size(), each, device="meta")
            for param, each in zip(params, strides, strict=True)
        ]
        self._take_memory()

    def _take_memory(self) -> None:
        """Allocate a new buffer in the same layout, and leave the old one to any tensor that still refers to it.

        Parameters may have other strides by now, but another rank may keep its buffer and so its layout.
        """
        self.flat = self._allocate(self.spec.numel, self.reduce_dtype, self.spec.device)  # [numel]
        self.comm_buffer = to_comm_buffer(self.flat)  # to communicate: not every backend can add complex numbers
        self.views = self.views_into(self.comm_buffer)
        self.groups = [self._group_of(places) for places in places_by_group(self.spec)]
        self.aliasing = self._make_aliasing(self) if self._make_aliasing is not None else None
        self._addresses = [view.data_ptr() for view in self.views]

    def _group_of(self, places: Sequence[int]) -> PackGroup:
        first, last = self.spec.slots[places[0]], self.spec.slots[places[-1]]
        are_neighbours = places[-1] - places[0] == len(places) - 1
        return PackGroup(
            [self.params[place] for place in places],
            [self.names[place] for place in places],
            self.flat[first.offset : last.offset + last.numel] if are_neighbours else None,
            [self.views[place] for place in places],
            self.grad_dtype,
            binds=self.grads_are_views,
        )

    def views_into(self, comm_buffer: torch.Tensor) -> list[torch.Tensor]:
        """Per-parameter tensors over the memory of any buffer laid out like this bucket's `comm_buffer`."""
        flat = from_comm_buffer(comm_buffer, self.spec)
        return [view_of(flat, slot, layout) for slot, layout in zip(self.spec.slots, self._layouts, strict=True)]

    def move_grads_in(self) -> None:
        """Move existing gradients into the buffer, if gradients are views of it."""
        for param, view in zip(self.params, self.views, strict=True) if self.grads_are_views else ():
            if param.grad is not None:
                view.copy_(param.grad.detach())
                streams.keep_for_current_stream(param.grad)  # it may have been allocated on another one
                param.grad = view

    def begin_pass(self, memory: Collection[int] = ()) -> None:
        """Before the first gradient is packed: allocate new memory if other tensors share the current memory.

        `memory`: the addresses of all buckets.
        """
        for param, view in zip(self.params, self.views, strict=True) if self.grads_are_views else ():
            grad = param.grad
            if grad is None or grad is view or grad.layout != torch.strided or lies_at(grad, view):
                continue
            if grad.untyped_storage().data_ptr() in memory:  # in the place of another one, which is packed first
                param.grad = grad.clone()
        is_held = self.aliasing is not None and self.aliasing.memory_is_held()
        # `grad.data = ...` has put other memory under a view
        is_moved = self.grads_are_views and list(map(torch.Tensor.data_ptr, self.views)) != self._addresses
        if is_held:
            self._make_aliasing = None  # for good: a gradient that is kept keeps the memory of the whole bucket
        if is_held or is_moved:
            self._take_memory()

    def pack(self, group: int, scaling: Scaling) -> None:
        """The gradients of a pack group have arrived."""
        self.groups[group].pack(scaling)

    def undo_pack(self, group: int, scaling: Scaling) -> None:
        """The bucket will not be reduced: restore the values before `pack` of gradients that are views of it."""
        for part in self.groups[group].parts() if self.grads_are_views else ():
            scaling.undo(part)

    def unpack(self, average: torch.Tensor, globally_unused: Sequence[bool] | None = None) -> None:
        """Put `average`, laid out like `comm_buffer`, into the gradients, except where `globally_unused[k]`.

        See [Note: how averages reach gradients].
        """
        averages = self.views if average is self.comm_buffer else self.views_into(average)
        if self.grads_are_views and average is not self.comm_buffer:
            torch._foreach_copy_(self.views, averages)
            averages = self.views
        if all(map(operator.is_, map(grad_of, self.params), averages)):
            return  # resident
        places = [k for k in range(len(self.params)) if not (globally_unused and globally_unused[k])]
        if self.grads_are_views:
            self._bind(places)
            return
        if self.aliasing is not None and average is self.comm_buffer:
            places = self.aliasing.alias(places)
        self._copy(averages, places)

    def _bind(self, places: Sequence[int]) -> None:
        for k in places:
            param, view, grad = self.params[k], self.views[k], self.params[k].grad
            if grad is view:
                continue
            if grad is not None and grad.numel() > 0 and not lies_at(grad, view):
                raise RuntimeError(
                    f"Detected at least one parameter gradient is not the expected DDP bucket view with "
                    f"gradient_as_bucket_view=True: `{self.names[k]}`. Something replaced its .grad during "
                    f"backward (another hook on the parameter, perhaps); leave .grad alone until it returns."
                )
            param.grad = view

    def _copy(self, averages: list[torch.Tensor], places: Sequence[int]) -> None:
        """Write the averages into existing gradients, and create the missing ones."""
        existing = []
        for k in places:
            if self.params[k].grad is None:
                self.params[k].grad = averages[k].to(self.params[k].dtype, copy=True)
            else:
                existing.append(k)
        if existing:
            torch._foreach_copy_([grad_of(self.params[k]) for k in existing], [averages[k] for k in existing])


def to_comm_buffer(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, with complex numbers as pairs of real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def from_comm_buffer(comm_buffer: torch.Tensor, spec: BucketSpec) -> torch.Tensor:
    """The inverse of `to_comm_buffer`."""
    return torch.view_as_complex(comm_buffer.view(-1, 2)) if spec.dtype.is_complex else comm_buffer


def view_of(flat: torch.Tensor, slot: Slot, layout: torch.Tensor) -> torch.Tensor:
    """A tensor over the slot's part of `flat`, with the shape and the strides of `layout`, which is dense.

    For autograd it is not a view of `flat`: a `.grad` that is a view could not be detached in place.
    """
    offset = flat.storage_offset() + slot.offset
    return flat.new_empty(0).set_(flat.untyped_storage(), offset, layout.size(), layout.stride())


def strides_of_gradient(param: torch.Tensor) -> tuple[int, ...]:
    """The strides that autograd gives a gradient of `param`.

    They are the parameter's own if these are non-overlapping and dense (channels_last or transposed, too), or else
    row-major.
    """
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    return param.stride() if is_dense else torch.empty(param.size(), device="meta").stride()
