"""`isinstance` holds after `register`."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp


class Derived(minddp.DistributedDataParallel):
    pass


def bare(wrapper: type) -> nn.Module:
    """An instance for which no constructor has run: none is needed to be recognised."""
    return wrapper.__new__(wrapper)


def test_minddp_and_what_derives_from_it_are_recognised_and_nothing_else() -> None:
    for _ in range(2):
        minddp.register()
        for wrapper in (minddp.DistributedDataParallel, Derived, TorchDDP):
            assert isinstance(bare(wrapper), TorchDDP)
            assert issubclass(wrapper, TorchDDP)
            assert isinstance(bare(wrapper), Joinable)
        assert not isinstance(nn.Linear(1, 1), TorchDDP)
        assert not issubclass(TorchDDP, minddp.DistributedDataParallel)


def test_joinable_needs_no_registration() -> None:
    assert Joinable in minddp.DistributedDataParallel.__mro__
