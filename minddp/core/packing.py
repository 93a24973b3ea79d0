"""A run: slots of a bucket that are packed together, while their gradients are still in the cache.

[Note: the mean is taken first]
The sum of the ranks is divided *before* it is taken: each rank scales its own gradients while packing. That
keeps sums in range for half precision, and it decides bits, so minddp scales exactly as torch does:
  - a gradient is multiplied by 1/world_size;
  - with gradient_as_bucket_view, one that already lies in the buffer is truly divided by world_size;
  - with batched_grad_copy all are truly divided;
  - with a communication hook nothing is scaled: the hook owns the arithmetic.
At world sizes that are no power of two a multiplication and a division differ in the last bit.

[Note: packing in runs]
Packing a whole bucket at once finds its first gradients gone from the cache, and keeps all their memory until
then. Packing each small gradient by itself costs a call for each; and a call in the middle of backward finds its
own code gone from the cache: 20 µs, whatever it copies. So a large gradient is packed as soon as it arrives, scaled
while it is copied, in one pass. Small ones wait for each other, also where large ones lie between them, and are
packed in *runs* as soon as the last of a run has arrived. On a GPU every call is a kernel launch and there is no
such cache to keep warm: there only gradients whose memory is worth giving back early are not packed with others.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from minddp.core.plan import BucketSpec

LARGE_BYTES = 64 * 1024  # from here on a gradient is a run by itself
LARGE_BYTES_ON_GPU = 1024 * 1024
RUN_BYTES = 512 * 1024  # with their part of the buffer, small gradients fill half of a 2 MiB second-level cache
RUN_SLOTS = 256  # so do the objects of tiny ones; and Python looks for garbage at every 700 new objects

grad_of = operator.attrgetter("grad")


@dataclass(frozen=True)
class Scaling:
    """How packing scales. See [Note: the mean is taken first].

    `divisor` is the world size as a rule, or `None` to leave gradients as they are. The next two tell what is
    truly divided rather than multiplied by the inverse; `by_parts`, that complex numbers are divided as pairs of
    real ones, which rounds otherwise.
    """

    divisor: float | None
    divide_copied: bool = False
    divide_resident: bool = False
    by_parts: bool = False

    @property
    def factor(self) -> float | None:
        """By what a gradient can be multiplied while it is copied; `None` if it must not be."""
        return None if self.divisor is None or self.divide_copied else 1.0 / self.divisor

    def apply(self, tensor: torch.Tensor, *, resident: bool) -> None:
        if self.divisor is None:
            return
        if self.divide_resident if resident else self.divide_copied:
            parts = torch.view_as_real(tensor) if self.by_parts and tensor.is_complex() else tensor
            parts.div_(self.divisor)
        else:
            tensor.mul_(1.0 / self.divisor)

    def apply_to_each(self, tensors: list[torch.Tensor], *, resident: bool) -> None:
        """As `apply`. One call multiplies them all, but not in half precision: it would round the factor to it."""
        multiplies = not (self.divide_resident if resident else self.divide_copied)
        if self.divisor is not None and multiplies and tensors[0].dtype in (torch.float32, torch.float64):
            torch._foreach_mul_(tensors, 1.0 / self.divisor)
        else:
            for tensor in tensors:
                self.apply(tensor, resident=resident)


class Run:
    """Slots of a bucket that are packed together. See [Note: packing in runs].

    `views[k]` is the tensor over the k-th slot, and `flat` the run's part of the bucket's buffer; `None` if other
    slots lie in between. `places` are the slots' places in the bucket. `grad_dtype` is that of the gradients;
    copying converts it to the buffer's.

    [Note: gradients in hand]
    To ask a parameter for `.grad` makes a Python object for a tensor that had none, which takes as long as copying
    a small one. So a run asks once, when its gradients are expected (`take`), and small ones are kept in hand until
    the averages are copied back into them.
    """

    def __init__(
        self,
        places: Sequence[int],
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        flat: torch.Tensor | None,
        views: list[torch.Tensor],
        grad_dtype: torch.dtype,
    ):
        self.places = places
        self.params = params
        self.names = names
        self.flat = flat
        self.views = views
        self._in_hand: list[torch.Tensor | None] | None = None
        self._dtypes = [grad_dtype] * len(views)
        self._addresses = [view.data_ptr() for view in views]
        self._layout_is_checked = False

    def take(self) -> bool:
        """Take the gradients in hand if all are there; whether so."""
        grads = list(map(grad_of, self.params))
        are_all_there = all(map(operator.is_not, grads, itertools.repeat(None)))
        self._in_hand = grads if are_all_there else None
        return are_all_there

    def pack(self, scaling: Scaling, *, bind: bool) -> None:
        """Fill this part of the buffer with this rank's gradients, scaled. A missing gradient counts as zero.

        `bind` makes `.grad` the view of what has been copied (gradient_as_bucket_view). A gradient may lie
        in the buffer already even if none was there when backward began: a hook may restore one that it has kept.
        """
        grads = self._in_hand or list(map(grad_of, self.params))
        self._in_hand = None
        as_expected = self._are_as_expected(grads)
        if not as_expected:
            self._check_layout(grads)
        if as_expected and not self._have_one_at_home(grads, bind):
            self._copy_all(cast("list[torch.Tensor]", grads), scaling)
            if not bind and len(grads) > 1:
                self._in_hand = grads
        elif all(map(operator.is_, grads, self.views)):
            self._scale(scaling, resident=True)
            return
        elif any(map(is_missing_or_at_home, grads, self.views)):
            self._copy_some(grads, scaling, bind)
        else:
            self._copy_all(cast("list[torch.Tensor]", grads), scaling)
        if bind:
            for param, grad, view in zip(self.params, grads, self.views, strict=True):
                if grad is not None and grad is not view:
                    param.grad = view

    def put_back(self) -> bool:
        """Copy this part of the buffer into the gradients in hand, and let go of them.

        Whether there are some, and they are the parameters' still; or nothing is copied.
        """
        grads, self._in_hand = self._in_hand, None
        if grads is None or not all(map(operator.is_, map(grad_of, self.params), grads)):
            return False
        targets = cast("list[torch.Tensor]", grads)
        torch._foreach_copy_(targets, self.views)
        return True

    def let_go(self) -> None:
        """Have no gradients in hand any more."""
        self._in_hand = None

    def _have_one_at_home(self, grads: Sequence[Any], bind: bool) -> bool:
        """Whether one of them is a view of the buffer already or, with `bind`, another tensor that lies there."""
        if any(map(operator.is_, grads, self.views)):
            return True
        return bind and any(map(operator.eq, map(torch.Tensor.data_ptr, grads), self._addresses))

    def _are_as_expected(self, grads: Sequence[Any]) -> bool:
        """Whether all gradients are there and have the right dtype, and strides have been looked at."""
        try:
            return self._layout_is_checked and [grad.dtype for grad in grads] == self._dtypes
        except AttributeError:
            return False  # one is missing

    def _copy_all(self, grads: list[torch.Tensor], scaling: Scaling) -> None:
        """The common case: every gradient is there and none lies in the buffer."""
        if len(grads) == 1 and scaling.factor is not None:
            torch.mul(grads[0], scaling.factor, out=self.views[0])
        else:
            torch._foreach_copy_(self.views, grads)
            self._scale(scaling, resident=False)

    def _scale(self, scaling: Scaling, *, resident: bool) -> None:
        if self.flat is not None:
            scaling.apply(self.flat, resident=resident)
        else:
            scaling.apply_to_each(self.views, resident=resident)

    def _copy_some(self, grads: Sequence[torch.Tensor | None], scaling: Scaling, bind: bool) -> None:
        for grad, view in zip(grads, self.views, strict=True):
            if grad is None:
                view.zero_()
            elif grad is view or (bind and is_missing_or_at_home(grad, view)):
                scaling.apply(view, resident=True)
            else:
                view.copy_(grad)
                scaling.apply(view, resident=False)

    def _check_layout(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Gradients of another dtype are an error, of other strides merely slow, and so only looked at once."""
        for name, grad, view, dtype in zip(self.names, grads, self.views, self._dtypes, strict=True):
            if grad is None:
                continue
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
            if not self._layout_is_checked and grad.stride() != view.stride() and grad.numel() > 0:
                warnings.warn(
                    f"Grad strides do not match bucket view strides for `{name}`: {grad.stride()} against "
                    f"{view.stride()} at sizes {tuple(grad.shape)}. The result is right, but copying is slow; "
                    f"give the gradient the parameter's memory format.",
                    stacklevel=2,
                )
        self._layout_is_checked = True


def is_missing_or_at_home(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Whether there is no gradient, or it lies in the buffer already, if perhaps as another object."""
    return grad is None or (grad.data_ptr() == view.data_ptr() and grad.numel() > 0)


def slots_by_run(spec: BucketSpec) -> list[list[int]]:
    """For each run its slots, as places in the bucket. See [Note: packing in runs]."""
    large_bytes, run_bytes, run_slots = LARGE_BYTES, RUN_BYTES, RUN_SLOTS
    if spec.device.type != "cpu":
        large_bytes, run_bytes, run_slots = LARGE_BYTES_ON_GPU, spec.nbytes, len(spec.slots)
    runs: list[list[int]] = []
    small: list[int] = []
    small_bytes = 0
    for place, slot in enumerate(spec.slots):
        nbytes = slot.numel * spec.dtype.itemsize
        if nbytes >= large_bytes:
            runs.append([place])
            continue
        if not small or small_bytes >= run_bytes or len(small) == run_slots:
            small, small_bytes = [], 0
            runs.append(small)
        small.append(place)
        small_bytes += nbytes
    return runs
