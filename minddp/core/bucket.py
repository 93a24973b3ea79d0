"""One bucket: a flat buffer and, for each parameter, a view into it.

Packing (`packing.py`) copies gradients into the buffer and scales them by 1/world_size, unpacking puts the averages
where the optimizer will look.

[Note: where a gradient lies]
A gradient is *resident* if `.grad` is the bucket's own view object: autograd then accumulates straight into the
buffer, and neither packing nor unpacking copies. With gradient_as_bucket_view every gradient becomes resident
when it is packed. Without it, large ones may come to lie in the buffer when backward ends, where that cannot be
seen: [Note: handing gradients over].
`zero_grad(set_to_none=True)` breaks the bond in every step, and the next packing copies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minddp.acceleration import gradient_aliasing as handover
from minddp.core.packing import Run, Scaling, grad_of, is_missing_or_at_home, slots_by_run
from minddp.core.plan import BucketPlan, BucketSpec, Slot
from minddp.modes.sparse import SparseBucket

#: Makes a flat tensor of as many elements of a dtype on a device: memory where the transport wants it.
Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def allocate_anywhere(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass(frozen=True)
class GradDtypes:
    """In which dtype gradients arrive, and in which they travel. `None` is the parameter's own."""

    arriving: torch.dtype | None = None
    travelling: torch.dtype | None = None


class Bucket:
    """A flat buffer, the parameters whose gradients it carries, and a view for each.

    `flat` is one-dimensional, of the spec's numel and device, and of its dtype unless `dtypes` has another.
    `views[k]` has the shape of `params[k]` and its strides where those are dense, so that packing never
    transposes. `runs` are what is packed. `wire` is `flat` as it travels: complex numbers as pairs of real ones,
    since not every backend can add them.
    """

    def __init__(
        self,
        spec: BucketSpec,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        grads_are_views: bool,
        adopt_grads: bool,
        dtypes: GradDtypes,
        allocate: Allocate,
    ):
        self.spec = spec
        self.params = list(params)
        self.names = list(names)
        self.grads_are_views = grads_are_views
        self.dtypes = dtypes
        self._new_memory = allocate
        self._hands_over = True
        self._allocate()
        if grads_are_views and adopt_grads:
            self._adopt_existing_grads()

    def views_into(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """Per-parameter tensors over the memory of any buffer laid out like this bucket's `wire`."""
        flat = from_wire(wire, self.spec)
        return [view_of(flat, slot, param) for slot, param in zip(self.spec.slots, self.params, strict=True)]

    def begin_pass(self) -> None:
        """Before the first gradient is packed: have memory that nobody else looks at, and views of it."""
        self.let_go()  # of what an interrupted pass has left
        if self._handed_over and self._others_still_look():
            self._hands_over = False
            self._allocate()
        elif self.grads_are_views and list(map(torch.Tensor.data_ptr, self.views)) != self._addresses:
            self._allocate()  # `grad.data = ...` has put other memory under a view

    def take(self, run: int) -> bool:
        """Get hold of a run's gradients; whether all are there."""
        return self.runs[run].take()

    def pack(self, run: int, scaling: Scaling) -> None:
        self.runs[run].pack(scaling, bind=self.grads_are_views)

    def let_go(self) -> None:
        """Have no gradients in hand any more."""
        for run in self.runs:
            run.let_go()

    def unpack(
        self, average: torch.Tensor, *, untouched: Sequence[bool] | None = None, may_hand_over: bool = False
    ) -> None:
        """Put `average`, laid out like `wire`, into the parameters' gradients.

        `untouched[k]` leaves the gradient of parameter k as it is: no rank has used that parameter.
        `may_hand_over` tells that this backward has made all gradients.
        """
        averages = self.views if average is self.wire else self.views_into(average)
        if self.grads_are_views and average is not self.wire:
            torch._foreach_copy_(self.views, averages)
            averages = self.views
        if all(map(operator.is_, map(grad_of, self.params), averages)):
            return
        is_plain = average is self.wire and not untouched
        runs = [run for run in self.runs if not (is_plain and run.put_back())]
        for run in runs:
            run.let_go()
        wanted = [place for run in runs for place in run.places if not (untouched and untouched[place])]
        if self.grads_are_views:
            self._bind(wanted)
            return
        if may_hand_over and self._hands_over and average is self.wire:
            wanted = [k for k in wanted if not (self._may_be_handed_over[k] and self._hand_over(k))]
        self._copy_back(wanted, averages)

    # ------------------------------------------------------------------ memory

    def _allocate(self) -> None:
        dtype = self.dtypes.travelling or self.spec.dtype
        self.flat = self._new_memory(self.spec.numel, dtype, self.spec.device)
        self.wire = to_wire(self.flat)
        self.views = self.views_into(self.wire)
        self.runs = [self._run_of(places) for places in slots_by_run(self.spec)]
        self._addresses = [view.data_ptr() for view in self.views]
        self._may_be_handed_over = [handover.may_be_handed_over(view) for view in self.views]
        self._handed_over: set[int] = set()
        self._references_of_ours = handover.references_to_memory(self.flat)

    def _run_of(self, places: Sequence[int]) -> Run:
        first, last = self.spec.slots[places[0]], self.spec.slots[places[-1]]
        are_neighbours = places[-1] - places[0] == len(places) - 1
        return Run(
            places,
            [self.params[place] for place in places],
            [self.names[place] for place in places],
            self.flat[first.offset : last.offset + last.numel] if are_neighbours else None,
            [self.views[place] for place in places],
            self.dtypes.arriving or self.spec.dtype,
        )

    def _adopt_existing_grads(self) -> None:
        """Move gradients that exist already into the buffer, when buckets are rebuilt."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
                param.grad = view

    def _hand_over(self, k: int) -> bool:
        """Make the bucket's memory the gradient of parameter k, if nobody can tell. Whether it is now.

        As a tensor of its own: what a script does to that one must not be done to the bucket's view.
        """
        param, view = self.params[k], self.views[k]
        if param.grad is None or param.grad.stride() != view.stride():
            return False
        if not handover.is_held_by_parameter_alone(param):
            return False
        param.grad = view_of(self.flat, self.spec.slots[k], param)
        self._handed_over.add(k)
        return True

    def _others_still_look(self) -> bool:
        """Whether anybody but the parameters refers to the memory of gradients that were handed over."""
        still_grads = sum(self._is_at_home(self.params[k].grad, k) for k in self._handed_over)
        tensors, to_storage = handover.references_to_memory(self.flat)
        return (tensors - still_grads, to_storage) != self._references_of_ours

    def _is_at_home(self, grad: torch.Tensor | None, k: int) -> bool:
        return grad is not None and grad.data_ptr() == self._addresses[k]

    # ------------------------------------------------------------------ into `.grad`

    def _copy_back(self, wanted: Sequence[int], averages: list[torch.Tensor]) -> None:
        """Write the averages into the gradients that exist, and make those that do not."""
        sources, targets = [], []
        for k in wanted:
            grad = self.params[k].grad
            if grad is None:
                self.params[k].grad = grad_like(self.params[k], averages[k])
            elif grad.data_ptr() != averages[k].data_ptr():
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
            if grad is not None and not is_missing_or_at_home(grad, view) and grad.numel() > 0:
                raise RuntimeError(
                    f"Detected at least one parameter gradient is not the expected DDP bucket view with "
                    f"gradient_as_bucket_view=True: `{self.names[k]}`. Something replaced its .grad during "
                    f"backward (another hook on the parameter, perhaps); leave .grad alone until it returns."
                )
            param.grad = view


def to_wire(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as the transport shall see it."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def from_wire(wire: torch.Tensor, spec: BucketSpec) -> torch.Tensor:
    """The inverse of `to_wire`."""
    return torch.view_as_complex(wire.view(-1, 2)) if spec.dtype.is_complex else wire


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
    plan: BucketPlan,
    params: Sequence[torch.nn.Parameter],
    *,
    grads_are_views: bool,
    adopt_grads: bool = True,
    dtypes: GradDtypes = GradDtypes(),
    allocate: Allocate = allocate_anywhere,
) -> list[Bucket | SparseBucket]:
    """The plan's buckets in launch order, with memory of their own, got from `allocate`.

    `adopt_grads` moves gradients that exist already there, if they are to be views of it.
    """

    def bucket_of(spec: BucketSpec) -> Bucket | SparseBucket:
        members = [params[slot.param] for slot in spec.slots]
        names = plan.names(spec.index)
        if spec.sparse:
            return SparseBucket(spec, members[0], names[0])
        return Bucket(
            spec,
            members,
            names,
            grads_are_views=grads_are_views,
            adopt_grads=adopt_grads,
            dtypes=dtypes,
            allocate=allocate,
        )

    return [bucket_of(spec) for spec in plan.buckets]
