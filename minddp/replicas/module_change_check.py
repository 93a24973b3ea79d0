"""Is the module still the one that was wrapped? A few submodules are looked at in each forward.

[Note: altered modules]
Construction settles which parameters are reduced: those that the module has and that require grad. One that is
added later, or set to require grad later, is trained by each rank on its own, and replicas diverge silently (torch
does not notice). To look at every parameter in every step would cost about as much as all hooks together. So a
forward looks at `FEW` submodules, in turn. What is done to a whole model, such as unfreezing it, is noticed in the
next forward; what is done to one of n submodules, within n / FEW forwards. The first two forwards look at all:
before training is when models are changed most.

A parameter that no longer requires grad, or has been removed, needs no search: its gradient is missing when
backward ends, see [Note: unfinished reduction]; with find_unused_parameters it merely counts as unused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

FEW = 4


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """A submodule with its children and parameters. `strangers` are parameters that are not reduced."""

    submodule: nn.Module
    members: Sequence[object]
    strangers: Sequence[nn.Parameter]

    def is_as_it_was(self) -> bool:
        members = (*self.submodule._modules.values(), *self.submodule._parameters.values())
        are_trained = map(operator.attrgetter("requires_grad"), self.strangers)
        return are_same(members, self.members) and not any(are_trained)


def are_same(objects: Sequence[object], others: Sequence[object]) -> bool:
    """True if these are the very same objects."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


class ModuleWatch:
    """What `module` was made of when it was wrapped. `known` are the parameters that are reduced or ignored.

    What goes by a name in `ignored` is not looked into: it may be replaced.
    """

    def __init__(self, module: nn.Module, known: Iterable[nn.Parameter], ignored: Collection[str] = ()):
        self._module = module
        self._ignored = ignored
        self._known = {id(param): param for param in known}  # kept alive, so that no other one gets their ids
        self._frozen = {id(param): param for param in module.parameters() if id(param) not in self._known}
        self._looks = 0
        self._remember()

    def look(self, *, everywhere: bool = False) -> None:
        """Once in each forward that trains; `everywhere` if something is known to be wrong.

        Raises:
            RuntimeError: a parameter requires grad but is not reduced. See [Note: altered modules].
        """
        self._looks += 1
        seen = self._places if everywhere or self._looks <= 2 else itertools.islice(self._turn, FEW)
        if not all(map(_Place.is_as_it_was, seen)):
            self._search()

    def _remember(self) -> None:
        self._places = []
        for submodule in self._module.modules():
            children, params = submodule._modules.values(), submodule._parameters.values()
            strangers = [param for param in params if param is not None and id(param) not in self._known]
            self._places.append(_Place(submodule, (*children, *params), strangers))
        self._turn = itertools.cycle(self._places)

    def _search(self) -> None:
        """Find out what has changed. Other submodules are no harm as such: they are remembered."""
        named = dict(self._module.named_parameters())
        self._known |= {id(param): param for name, param in named.items() if name in self._ignored}
        strays = [
            f"`{name}` {'did not require grad' if id(param) in self._frozen else 'was not there'}"
            for name, param in named.items()
            if param.requires_grad and id(param) not in self._known and isinstance(param, nn.Parameter)
        ]
        if strays:
            raise RuntimeError(
                f"Parameters require grad that are not reduced: {', '.join(strays)} when the module was wrapped. "
                f"Wrap it after changing it, or name them in `_ddp_params_and_buffers_to_ignore`."
            )
        if all(isinstance(param, nn.Parameter) for param in named.values()):
            self._remember()  # else tensors stand in for a while (`functional_call`); do not keep them
