"""One hook per run instead of one per parameter, wherever that is as good.

[Note: one hook per run]
A hook in Python costs some 2 µs, several times what one in C++ costs, and nearly all of them have nothing to say:
only the last gradient of a run sets anything off. So once a backward under the final plan has shown which gradient
that is, all other hooks are taken off. The last one *speaks* for its run: if no parameter had a gradient when
backward began, and all of the run have one now, they have arrived. Packing looks at each `.grad` in any case.

Where that is not certain, nothing is assumed:
  - A gradient was there when backward began (accumulation, zero_grad(set_to_none=False)): every parameter gets its
    hook back at once, before it is needed, and keeps it.
  - The speaker was not the last this time, or a gradient is undefined, or nobody saw backward begin: the engine is
    asked when it ends, see `Reducer._catch_up`. That is right, but hides nothing, so every parameter gets its hook
    back for good.
  - Somebody has to know who is used: no one speaks for others then. A static graph has settled that, and has
    speakers if its first backward gave each parameter one gradient.

Who only watches, such as X-ray, is told of every gradient by a hook that does nothing else. It is one that torch
calls faster, and that would not do for counting: see [Note: the hook sits on the accumulator].

What goes unnoticed is a gradient that is accumulated twice in one backward, if no backward before was like that.
With every hook in place, as in the first backwards, that is an error; torch has all its hooks always. Nor is it
noticed if the script itself fills every `.grad` in a hook on the output and, in the same backward, gradients come
in another order: the speaker then takes what it finds for what was to come.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from minddp.core import autograd
from minddp.core.events import Event, EventKind, EventSink
from minddp.core.packing import grad_of


class Speakers:
    """Those who speak for their runs, if any do. See [Note: one hook per run]."""

    def __init__(self, hooks: autograd.Hooks, params: Sequence[torch.nn.Parameter]):
        self._hooks = hooks
        self._params = params
        self._speakers: frozenset[int] = frozenset()
        self._clean_backward = -1
        self._sink: EventSink | None = None
        self._notes: list[RemovableHandle] = []
        self.may_be_elected = True

    @property
    def in_office(self) -> bool:
        return bool(self._speakers)

    @property
    def speak_now(self) -> bool:
        """Whether they speak for others in the backward that is running."""
        return bool(self._speakers) and autograd.current_backward() == self._clean_backward

    def elect(self, last_of_runs: Collection[int]) -> None:
        """Each of these speaks for its run from the next backward on."""
        self._speakers = frozenset(last_of_runs)
        self._hooks.keep_only(self._speakers)
        self._place_notes()

    def dismiss(self, *, for_good: bool = False) -> None:
        """Every parameter speaks for itself again."""
        self.may_be_elected &= not for_good
        if self.in_office:
            self._speakers = frozenset()
            self._hooks.restore()
            self._place_notes()

    def see_backward_begin(self) -> bool:
        """A gradient has entered at the outputs, and none has reached a parameter yet; whether they may speak."""
        is_clean = all(map(operator.is_, map(grad_of, self._params), itertools.repeat(None)))
        self._clean_backward = autograd.current_backward() if is_clean else -1
        return is_clean

    def see_backward_end(self) -> None:
        self._clean_backward = -1

    def saw_this_begin(self) -> bool:
        """Whether the backward that is running has begun without gradients."""
        return autograd.current_backward() == self._clean_backward

    # ------------------------------------------------------------------ who only watches

    def tell_of_each(self, sink: EventSink | None) -> None:
        """As long as they speak for others, let `sink` hear of each gradient nevertheless."""
        self._sink = sink
        self._place_notes()

    def fall_silent(self) -> None:
        """Leave nothing behind on the parameters, which may outlive this."""
        for handle in self._notes:
            handle.remove()
        self._notes = []

    def _place_notes(self) -> None:
        self.fall_silent()
        if self._sink is not None and self.in_office:
            self._notes = [
                param.register_post_accumulate_grad_hook(
                    self._note(self._sink, Event(EventKind.PARAM_READY, index))
                )
                for index, param in enumerate(self._params)
                if param.requires_grad  # or has been frozen since
            ]

    def _note(self, sink: EventSink, event: Event) -> Callable[[torch.Tensor], None]:
        def note(_param: torch.Tensor) -> None:
            if self._clean_backward >= 0:  # one that is to be reduced
                sink(event)

        return note
