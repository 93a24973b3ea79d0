from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import TensorDataset

from minddp.tools.train.batches import Batches, validation_batches
from minddp.tools.train.settings import Settings, SettingsError
from minddp.tools.train.world import World


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n) * 10)


SETTINGS = Settings(batch_size=3, seed=5, validation_samples=10)


def world(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"), None)  # type: ignore[arg-type]


def stream(samples: int = 23, size: int = 2, rank: int = 0) -> Batches:
    """23 samples: 11 for each of two ranks, 3 batches of 3 an epoch."""
    return Batches(numbers(samples), SETTINGS, world(rank, size))


def take(batches: Batches, count: int) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in itertools.islice(batches, count)]


def test_every_epoch_has_an_order_of_its_own() -> None:
    batches = take(stream(), 9)
    assert batches[0:3] != batches[3:6] != batches[6:9] != batches[0:3]


@pytest.mark.parametrize("taken", range(8))
def test_a_stream_finds_its_place_again(taken: int) -> None:
    whole = take(stream(rank=1), 12)
    before, after = stream(rank=1), stream(rank=1)
    assert take(before, taken) == whole[:taken]
    after.epoch, after.samples = before.epoch, before.samples
    assert take(after, 12 - taken) == whole[taken:]


def test_another_number_of_ranks_goes_on_behind_the_samples_that_were_seen() -> None:
    """After 2 steps of two ranks 12 samples; three ranks take 9 a step, and go on from 18."""
    before = [stream(samples=60, rank=rank) for rank in range(2)]
    seen = [i for one in before for batch in take(one, 2) for i in batch]
    assert [(one.epoch, one.samples) for one in before] == [(0, 12)] * 2
    assert len(set(seen)) == 12, "a sample was dealt twice"
    after = [stream(samples=60, size=3, rank=rank) for rank in range(3)]
    for one in after:
        one.samples = 12
    rest = [i for one in after for batch in take(one, 1) for i in batch]
    assert not set(seen) & set(rest)
    assert [one.samples for one in after] == [27] * 3


def test_reading_batches_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(stream(), 7)
    list(validation_batches(numbers(9), SETTINGS, world(0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_samples_are_an_error_not_an_endless_loop() -> None:
    with pytest.raises(SettingsError, match="5 training samples do not fill one batch of 3 for each of 2 ranks"):
        stream(samples=5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_shares_cover_each_sample_once(world_size: int) -> None:
    shares = [validation_batches(numbers(14), SETTINGS, world(rank, world_size)) for rank in range(world_size)]
    seen = [i for share in shares for inputs, _ in share for i in inputs.tolist()]
    assert sorted(seen) == [0, 1, 2, 4, 5, 7, 8, 9, 11, 12]  # evenly spread


def test_a_small_set_is_validated_whole() -> None:
    (batch,) = validation_batches(numbers(3), SETTINGS, world(0, 1))
    assert batch[0].tolist() == [0, 1, 2]
