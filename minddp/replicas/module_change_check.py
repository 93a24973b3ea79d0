"""A check in each forward that the module still has the parameters that it was wrapped with.

Each rank would train a parameter that is added or unfrozen after construction by itself, and replicas would diverge
silently, as in torch. Looking at every parameter in every step would cost about as much as all hooks together. So a
forward checks `FEW` submodules, in turn. The first two forwards check all submodules. So does a forward after a
backward that lacked gradients. A change of the whole model, such as unfreezing it or another `ddp.module`, is
noticed at once. A change of one among n submodules is noticed within n / FEW forwards.

A parameter that is removed, or frozen, needs no check. Its gradient is missing at the end of backward, which is an
error, see [Note: unfinished reduction]; with find_unused_parameters it counts as unused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

FEW = 4


@dataclass(frozen=True, eq=False, slots=True)
class _Snapshot:
    """A submodule, its children and parameters, and those parameters that are not reduced."""

    submodule: nn.Module
    members: Sequence[object]
    unknown: Sequence[nn.Parameter]

    def is_unchanged(self) -> bool:
        members = (*self.submodule._modules.values(), *self.submodule._parameters.values())
        are_trained = map(operator.attrgetter("requires_grad"), self.unknown)
        are_same = len(members) == len(self.members) and all(map(operator.is_, members, self.members))
        return are_same and not any(are_trained)


class ModuleChangeCheck:
    """`known` are the parameters that are reduced or ignored. Parameters named in `ignored` may be replaced."""

    def __init__(self, module: nn.Module, known: Iterable[nn.Parameter], ignored: Collection[str] = ()):
        self._module = module
        self._ignored = ignored
        self._known = {id(param): param for param in known}  # references keep the ids unique
        self._frozen = {id(param): param for param in module.parameters() if id(param) not in self._known}
        self._num_checks = 0
        self._take_snapshots()

    def check(self, module: nn.Module, *, everywhere: bool = False) -> None:
        """Check a few submodules of `module`, or all if `everywhere`. Called once in each forward that trains.

        Raises:
            RuntimeError: a parameter requires grad but is not reduced.
        """
        self._num_checks += 1
        chosen = self._snapshots if everywhere or self._num_checks <= 2 else itertools.islice(self._in_turn, FEW)
        if module is not self._module or not all(map(_Snapshot.is_unchanged, chosen)):
            self._module = module
            self._check_all_parameters()

    def _take_snapshots(self) -> None:
        self._snapshots = []
        for submodule in self._module.modules():
            children, params = submodule._modules.values(), submodule._parameters.values()
            unknown = [param for param in params if param is not None and id(param) not in self._known]
            self._snapshots.append(_Snapshot(submodule, (*children, *params), unknown))
        self._in_turn = itertools.cycle(self._snapshots)

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
            self._take_snapshots()
