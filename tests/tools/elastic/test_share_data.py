"""Samples and their random states do not depend on who loads them."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from minddp.tools.elastic.share_data import ShareLoader


class Augmented(Dataset[Any]):
    """Each sample is its index and three random numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])

    def __len__(self) -> int:
        return 50


def epoch_of(loader: ShareLoader, share: int, first: int = 0) -> list[torch.Tensor]:
    return [loader.batch(step, share) for step in range(first, len(loader))]


def test_an_epoch_has_every_sample_and_shares_are_equally_long() -> None:
    loader = ShareLoader(Augmented(), 4, num_shares=4)
    seen = [torch.cat(epoch_of(loader, share))[:, 0].long().tolist() for share in range(4)]
    assert {len(indices) for indices in seen} == {13}
    assert {index for indices in seen for index in indices} == set(range(50))
    loader.set_epoch(1)
    assert torch.cat(epoch_of(loader, 0))[:, 0].long().tolist() != seen[0]


def test_the_short_end_is_left_out_on_request() -> None:
    loader = ShareLoader(Augmented(), 5, num_shares=4, drop_last=True)
    assert len(loader) == 2
    assert [len(batch) for batch in epoch_of(loader, 3)] == [5, 5]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_a_share_that_is_taken_over_continues_with_the_same_samples(options: dict[str, Any]) -> None:
    gc.collect()  # a process group of an earlier test, collected in a forked worker, waits for its threads forever
    whole = epoch_of(ShareLoader(Augmented(), 4, num_shares=4, seed=7), 2)
    rest = epoch_of(ShareLoader(Augmented(), 4, num_shares=4, seed=7, **options), 2, first=2)
    assert torch.equal(torch.cat(whole[2:]), torch.cat(rest))


def test_a_step_can_be_loaded_again_and_there_is_no_other() -> None:
    loader = ShareLoader(Augmented(), 4, num_shares=4)
    batches = epoch_of(loader, 1)
    assert torch.equal(loader.batch(1, 1), batches[1])
    with pytest.raises(IndexError, match="An epoch of 4 steps has no step 4"):
        loader.batch(4, 1)


def test_loading_draws_nothing_from_the_random_state_of_the_share() -> None:
    before = torch.get_rng_state()
    ShareLoader(Augmented(), 4, num_shares=4).batch(0, 0)
    assert torch.equal(before, torch.get_rng_state())
