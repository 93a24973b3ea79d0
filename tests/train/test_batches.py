from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

from minddp.train.batches import BatchStream, Position, spread, validation_batches
from minddp.train.settings import SettingsError


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n) * 10)


def stream(rank: int = 0, samples: int = 23, world_size: int = 2) -> BatchStream:
    """23 samples: 11 for each of two ranks, 3 batches of 3 an epoch."""
    return BatchStream(numbers(samples), batch_size=3, rank=rank, world_size=world_size, seed=5)


def take(batches: BatchStream, count: int) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in islice(batches, count)]


def test_an_epoch_deals_every_sample_at_most_once() -> None:
    dealt = [i for rank in (0, 1) for batch in take(stream(rank), 3) for i in batch]
    assert len(dealt) == len(set(dealt)) == 18


def test_every_epoch_has_an_order_of_its_own() -> None:
    batches = take(stream(), 9)
    assert batches[0:3] != batches[3:6] != batches[6:9] != batches[0:3]


@pytest.mark.parametrize("taken", range(8))
def test_a_stream_finds_its_place_again(taken: int) -> None:
    whole = take(stream(rank=1), 12)
    before, after = stream(rank=1), stream(rank=1)
    assert take(before, taken) == whole[:taken]
    after.position = before.position
    assert take(after, 12 - taken) == whole[taken:]


def test_the_position_counts_batches_of_the_epoch() -> None:
    batches = stream()
    assert batches.position == Position(epoch=0, batches=0)
    take(batches, 3)
    assert batches.position == Position(epoch=0, batches=3)
    take(batches, 1)  # `take` begins a new iteration, as a resumed run does
    assert batches.position == Position(epoch=1, batches=1)


def test_reading_batches_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(stream(), 7)
    list(validation_batches(numbers(9), 9, 2, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_samples_are_an_error_not_an_endless_loop() -> None:
    with pytest.raises(SettingsError, match="5 training samples do not fill one batch of 3 on each of 2 ranks"):
        stream(samples=5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_shares_cover_each_sample_once(world_size: int) -> None:
    shares = [validation_batches(numbers(10), 7, 2, rank, world_size) for rank in range(world_size)]
    seen = [i for share in shares for inputs, _ in share for i in inputs.tolist()]
    assert sorted(seen) == spread(10, 7)


def test_samples_are_spread_evenly() -> None:
    assert spread(10, 5) == [0, 2, 4, 6, 8]
    assert spread(3, 5) == [0, 1, 2]
