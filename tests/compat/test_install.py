"""`isinstance` holds after `register`. `install` reaches every global name of torch's class, and gives each back.

Torch's class is `recognition.TorchDDP` here: a global name of this module would come to mean minddp's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint.state_dict
import torch.nn.parallel.distributed
from torch import nn
from torch.distributed.algorithms.join import Joinable

import minddp
from minddp.compat import install as recognition


@pytest.fixture
def importer() -> Iterator[ModuleType]:
    """A module that has bound torch's class already, under a name of its own."""
    module = ModuleType("a_framework.strategies")
    module.Wrapper = recognition.TorchDDP
    module.unrelated = torch.nn.Linear
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_torch_s_own_names_and_later_imports_yield_minddp() -> None:
    with minddp.install():
        from torch.nn.parallel import DistributedDataParallel
        from torch.nn.parallel.distributed import DistributedDataParallel as Same

        assert DistributedDataParallel is Same is minddp.DistributedDataParallel
        assert torch.nn.parallel.DistributedDataParallel is minddp.DistributedDataParallel
        assert torch.distributed.checkpoint.state_dict.DDP is minddp.DistributedDataParallel
    assert torch.nn.parallel.DistributedDataParallel is recognition.TorchDDP
    assert torch.nn.parallel.distributed.DistributedDataParallel is recognition.TorchDDP
    assert torch.distributed.checkpoint.state_dict.DDP is recognition.TorchDDP


def test_a_name_that_was_bound_before_is_changed_and_given_back(importer: ModuleType) -> None:
    with minddp.install():
        assert importer.Wrapper is minddp.DistributedDataParallel
        assert importer.unrelated is torch.nn.Linear
    assert importer.Wrapper is recognition.TorchDDP


def test_minddp_itself_keeps_the_original() -> None:
    with minddp.install():
        assert recognition.TorchDDP.__module__ == "torch.nn.parallel.distributed"


def test_it_registers_too_so_that_references_elsewhere_recognise_minddp() -> None:
    kept_elsewhere = (recognition.TorchDDP, torch.nn.DataParallel)
    with minddp.install():
        assert kept_elsewhere[0] is recognition.TorchDDP
        assert issubclass(minddp.DistributedDataParallel, kept_elsewhere)


def test_the_second_of_two_installs_undoes_nothing(importer: ModuleType) -> None:
    with minddp.install():
        with minddp.install():
            pass
        assert importer.Wrapper is minddp.DistributedDataParallel
        assert issubclass(minddp.DistributedDataParallel, recognition.TorchDDP)
    assert importer.Wrapper is recognition.TorchDDP


def test_modules_that_import_on_demand_are_not_made_to(importer: ModuleType) -> None:
    asked = []
    importer.__getattr__ = asked.append
    with minddp.install():
        pass
    assert asked == []


# ------------------------------------------------------------------ registration


class Derived(minddp.DistributedDataParallel):
    pass


def bare(wrapper: type) -> nn.Module:
    """An instance for which no constructor has run: none is needed to be recognised."""
    return wrapper.__new__(wrapper)


def test_minddp_and_what_derives_from_it_are_recognised_and_nothing_else() -> None:
    for _ in range(2):
        minddp.register()
        for wrapper in (minddp.DistributedDataParallel, Derived, recognition.TorchDDP):
            assert isinstance(bare(wrapper), recognition.TorchDDP)
            assert issubclass(wrapper, recognition.TorchDDP)
            assert isinstance(bare(wrapper), Joinable)
        assert not isinstance(nn.Linear(1, 1), recognition.TorchDDP)
        assert not issubclass(recognition.TorchDDP, minddp.DistributedDataParallel)


def test_joinable_needs_no_registration() -> None:
    assert Joinable in minddp.DistributedDataParallel.__mro__
