"""A check in each forward that the module still has the parameters that it was wrapped with.

Each rank would train a parameter that is added or unfrozen after construction by itself, and replicas would diverge
silently, as in torch. A parameter that is removed, or frozen, needs no check. Its gradient is missing at the end of
backward, which is an error, see [Note: unfinished reduction]; with find_unused_parameters it counts as unused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn


class ModuleChangeCheck:
    """`known` are the parameters that are reduced or ignored. Parameters named in `ignored` may be replaced."""

    def __init__(self, module: nn.Module, known: Iterable[nn.Parameter], ignored: Collection[str] = ()):
        self._module = module
        self._ignored = ignored
        self._known = {id(param): param for param in known}  # references keep the ids unique
        self._frozen = {id(param): param for param in module.parameters() if id(param) not in self._known}
        self._take_snapshot()

    def check(self, module: nn.Module) -> None:
        """Called in each forward of `module` that trains.

        Raises:
            RuntimeError: a parameter requires grad but is not reduced.
        """
        are_trained = map(operator.attrgetter("requires_grad"), self._unknown)
        if module is not self._module or not self._has_same_members() or any(are_trained):
            self._module = module
            self._check_all_parameters()

    def _has_same_members(self) -> bool:
        """Without a step of Python for each submodule: some have hundreds."""
        members = list(itertools.chain.from_iterable(map(dict.values, self._with_members)))
        are_as_many = sum(map(len, self._dicts)) == len(members) == len(self._members)
        return are_as_many and all(map(operator.is_, members, self._members))

    def _take_snapshot(self) -> None:
        """Of the children and parameters of each submodule."""
        submodules = list(self._module.modules())
        self._dicts: list[dict[str, Any]] = [
            members for each in submodules for members in (each._modules, each._parameters)
        ]
        self._with_members = [members for members in self._dicts if members]
        self._members = [member for members in self._with_members for member in members.values()]
        self._unknown = [param for param in self._module.parameters() if id(param) not in self._known]

    def _check_all_parameters(self) -> None:
        named = dict(self._module.named_parameters())
        self._known |= {id(param): param for name, param in named.items() if name in self._ignored}
        not_reduced = [
            f"`{name}` {'did not require grad' if id(param) in self._frozen else 'did not exist'}"
            for name, param in named.items()
            if param.requires_grad and id(param) not in self._known and isinstance(param, nn.Parameter)
        ]
        if not_reduced:
            raise RuntimeError(
                f"Parameters require grad that are not reduced: {', '.join(not_reduced)} when the module was "
                f"wrapped. Wrap it after changing it, or name them in `_ddp_params_and_buffers_to_ignore`."
            )
        if all(isinstance(param, nn.Parameter) for param in named.values()):  # not during `functional_call`
            self._take_snapshot()
