"""`isinstance` holds after `register`, and nothing is left of it after the undo."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp


class Derived(minddp.DistributedDataParallel):
    pass


def bare(wrapper: type) -> nn.Module:
    """An instance for which no constructor has run: none is needed to be recognised."""
    return wrapper.__new__(wrapper)


@pytest.mark.parametrize("wrapper", [minddp.DistributedDataParallel, Derived])
def test_recognised_while_registered_and_not_after(wrapper: type) -> None:
    assert not isinstance(bare(wrapper), TorchDDP)  # which is cached
    for _ in range(2):
        with minddp.register():
            assert isinstance(bare(wrapper), TorchDDP)
            assert issubclass(wrapper, TorchDDP)
            assert isinstance(bare(wrapper), Joinable)
        assert not isinstance(bare(wrapper), TorchDDP)
        assert not issubclass(wrapper, TorchDDP)


def test_joinable_needs_no_registration() -> None:
    assert Joinable in minddp.DistributedDataParallel.__mro__


def test_others_stay_unrecognised_and_torch_s_own_recognised() -> None:
    with minddp.register():
        assert isinstance(bare(TorchDDP), TorchDDP)
        assert not isinstance(nn.Linear(1, 1), TorchDDP)
        assert not issubclass(TorchDDP, minddp.DistributedDataParallel)
    assert isinstance(bare(TorchDDP), TorchDDP)


def test_only_the_call_that_registered_undoes_it() -> None:
    first = minddp.register()
    second = minddp.register()
    second.close()
    assert issubclass(minddp.DistributedDataParallel, TorchDDP)
    first.close()
    assert not issubclass(minddp.DistributedDataParallel, TorchDDP)


def test_unregister_needs_no_handle_and_no_registration() -> None:
    minddp.unregister()
    minddp.register()
    minddp.unregister()
    assert not issubclass(minddp.DistributedDataParallel, TorchDDP)


def test_registrations_by_others_survive_the_undo() -> None:
    class Foreign(nn.Module):
        pass

    TorchDDP.register(Foreign)
    with minddp.register():
        assert issubclass(Foreign, TorchDDP)
    assert issubclass(Foreign, TorchDDP)
    assert not issubclass(minddp.DistributedDataParallel, TorchDDP)


def test_an_exception_within_the_block_undoes_it_too() -> None:
    with pytest.raises(KeyError), minddp.register():
        raise KeyError
    assert not issubclass(minddp.DistributedDataParallel, TorchDDP)
