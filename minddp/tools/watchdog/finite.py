"""`check_finite`: each bucket is tested for NaN and infinity before averaging spreads them to every rank.

An average that is NaN does not show which rank it came from. So each rank tests a bucket before it is launched, and
marks the first element that is not finite. All buckets are launched whatever was found, so that the ranks stay in
step. When the averages are in the gradients, the ranks exchange their first marks by a small all-reduce, and all
raise the same error. This comes last, since a communication hook may launch collectives until then.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from minddp.core.backward_pass import Phase
from minddp.core.bucket import Bucket
from minddp.core.mode import Mode
from minddp.core.plan import BucketSpec
from minddp.core.reducer import Reducer
from minddp.extension import Extension
from minddp.options import exclude
from minddp.platform import wording
from minddp.tools.watchdog.check import FIRST, Check, Finding, Notes, is_sampled
from minddp.tools.watchdog.fingerprint import Copied, readable
from minddp.tools.watchdog.misuse import NamedParams

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # so that a sum does not overflow


class CheckFinite(Mode):
    """Tests the buckets that `reducer` launches, and exchanges marks.

    A rank's mark is twice the number of the parameter, plus 1 for NaN or 2 for infinity; or 0.
    """

    def __init__(self, reducer: Reducer):
        self._reducer = weakref.ref(reducer)
        # Of buckets in launch order: the first element that is not finite, else any; its position and value.
        self._suspects: list[tuple[BucketSpec, torch.Tensor, torch.Tensor]] = []

    def first_gradient(self, param: int) -> None:
        self._suspects.clear()  # an exception may have ended the last backward

    def shadow_begins(self) -> None:
        self._suspects.clear()

    def before_launch(self, bucket: Bucket, contents: torch.Tensor) -> None:
        reducer = self._reducer()
        assert reducer is not None, "it launches"
        flat = contents._values().view(-1) if contents.is_sparse else contents
        # A sum is not finite if an element is not, or it overflows. On an accelerator the host would wait for it.
        if flat.numel() and not (flat.is_cpu and math.isfinite(flat.sum().item())):
            first = flat.isfinite().byte().argmin()
            self._suspects.append((bucket.spec, first, flat.take(first)))
        if self not in reducer.futures:
            reducer.futures.append(self)

    def wait(self) -> None:
        """Exchange the marks. Collective.

        Raises:
            FloatingPointError: a gradient of some rank was not finite; the same on every rank.
        """
        reducer = self._reducer()
        assert reducer is not None, "its backward has just ended"
        if reducer.phase not in (Phase.IDLE, Phase.FINISHED):  # an exception has ended the backward
            return
        transport = reducer.transport
        marks = torch.zeros(transport.world_size, dtype=torch.int64, device=reducer.params[0].device)
        marks[transport.rank] = self._mark()
        transport.all_reduce(marks).wait()
        if mark_of_rank := {rank: mark for rank, mark in enumerate(marks.tolist()) if mark}:
            raise not_finite(reducer, mark_of_rank)

    def _mark(self) -> int:
        for spec, first, value in self._suspects:
            if not value.isfinite().item():
                element = 0 if spec.sparse else int(first.item()) // (2 if spec.dtype.is_complex else 1)
                param = next(s.param for s in spec.slots if s.offset <= element < s.offset + s.numel)
                return 2 * param + 1 + int(value.isinf().item())
        return 0


def not_finite(reducer: Reducer, mark_of_rank: dict[int, int]) -> FloatingPointError:
    plan, offenders = reducer.store.plan, []
    for rank, mark in mark_of_rank.items():
        param, is_infinite = divmod(mark - 1, 2)
        name, kind = plan.params[param].name, "infinity" if is_infinite else "NaN"
        offenders.append(f"rank {rank}'s gradient of `{name}` (bucket {plan.slot_of[param].bucket}) has {kind}")
    return FloatingPointError(
        f"In backward {reducer.num_passes}, before averaging, {wording.joined(offenders)}. Now the averages in "
        f"`.grad` are not finite either, on any rank: to go on, call zero_grad() instead of optimizer.step(). Look "
        f"at the batch and the loss of {wording.ranks(list(mark_of_rank))} in this step; if training diverges, "
        f"lower the learning rate or clip gradients. With a GradScaler infinity is normal: leave check_finite out."
    )


@dataclass(eq=False)
class FiniteGradients(Extension):
    """Tests buckets for NaN and infinity before they are reduced."""

    def agreed(self) -> Mapping[str, object]:
        return {"check_finite": True}

    def check(self, arguments: Mapping[str, Any]) -> None:
        if arguments["delay_all_reduce_named_params"]:
            exclude("`delay_all_reduce_named_params`", {"`check_finite`": True})

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        ddp._reducer.modes.append(CheckFinite(ddp._reducer))


class NotFiniteCheck(Check):
    """Does an optimizer step after gradients with NaN or infinity? In the sampled steps of a guard.

    In the first of them it knows whose gradients those are.

    A GradScaler leaves such a step out. `params` are on one device.
    """

    def __init__(self, params: NamedParams):
        self._params = params
        self._hooks: list[tuple[torch.nn.Parameter, RemovableHandle]] = []
        self._own: list[tuple[str, torch.Tensor]] = []  # the sums of this rank's gradients, as they arrive
        self._step: int | None = None  # sampled, and not seen by an optimizer yet
        self._new: deque[tuple[int, list[tuple[str, Copied]]]] = deque()

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.post_backward()
        self._own = own = []
        if step < FIRST:  # a hook for each parameter; later ones look at averages, in which each rank's NaN shows
            note = lambda name, grad: (  # noqa: E731
                None if grad is None else own.append((name, grad.sum(dtype=WIDE.get(grad.dtype))))
            )
            for name, param in self._params:
                if param.requires_grad:  # it may be frozen by now
                    self._hooks.append((param, param.register_hook(partial(note, name))))

    def first_gradient(self, step: int) -> None:
        self._step = step if is_sampled(step) else None

    def post_backward(self) -> None:
        for param, hook in self._hooks:
            hook.remove()
            if not param._backward_hooks:  # else torch goes on to call an empty dictionary for each gradient
                param._backward_hooks = None
        self._hooks = []

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._step is not None and getattr(optimizer, "found_inf", None) is None:  # else it leaves the step out
            if not (sums := self._own):  # the hooks of FSDP2's parameters do not fire
                grads = readable((name, param.grad) for name, param in self._params)
                sums = [(name, grad.sum(dtype=WIDE.get(grad.dtype))) for name, grad in grads.items()]
            self._new.append((self._step, [(name, Copied(value)) for name, value in sums]))
        self._step = None

    def take_notes(self, is_last: bool = False) -> Notes:
        taken = [self._new.popleft() for _ in range(len(self._new))]
        return [(step, [name for name, it in sums if not it.read().isfinite().item()]) for step, sums in taken]

    def release(self) -> None:
        for _, hook in self._hooks:  # perhaps within a backward, which may be calling them
            hook.remove()
        self._params, self._hooks = (), []

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        if found := {rank: names for rank, names in enumerate(notes) if names}:
            first = next(iter(found.values()))
            text = (
                f"In step {number} gradients of {wording.ranks([*found])} are not finite, first that of "
                f"`{first[0]}`, and an optimizer steps with them: averages and weights have NaN on all ranks. Go "
                f"back to a checkpoint, look at the batch and the loss of that step, and lower the learning rate "
                f"or clip gradients."
            )
            yield Finding("not finite", "gradients", number, tuple(found), text)
