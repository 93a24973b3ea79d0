"""After an all-reduce in shared memory: futures, copies back, and events in torch's profiler."""

from __future__ import annotations

import datetime

import pytest
import torch
from torch.profiler import profile

from tests.ranks import on_ranks
from tests.transport.places import CPU, opened


@on_ranks(2)
def test_a_future_brings_the_sum_or_the_error(rank: int) -> None:
    """The futures of a resident tensor, of a copy, and of a call that fails."""
    transport = opened()
    tensor = transport.allocate(10, torch.float32, CPU).fill_(rank + 1)
    assert sum(transport.all_reduce(tensor).get_future().wait()[0]).item() == 30
    copied = torch.full((2, 3), rank + 1.0)
    [total] = transport.all_reduce(copied).get_future().wait()
    assert total.data_ptr() == copied.data_ptr()
    assert copied.tolist() == [[3.0] * 3] * 2
    work = transport.all_reduce(transport.allocate(5 + rank, torch.float32, CPU))
    with pytest.raises(RuntimeError, match=r"rank 0 calls all_reduce of 5 elements of torch\.float32, but rank 1"):
        work.get_future().wait()


@on_ranks(2)
def test_a_profile_shows_them_as_it_shows_gloos(rank: int) -> None:
    transport = opened()
    tensor = transport.allocate(1000, torch.float32, CPU).fill_(1)
    transport.all_reduce(tensor).wait()  # outside
    with profile(record_shapes=True) as seen:
        for _ in range(3):
            transport.all_reduce(tensor).wait(datetime.timedelta(seconds=60))
    events = [event for event in seen.events() if event.name.startswith("gloo:")]
    assert [event.name for event in events] == ["gloo:all_reduce"] * 3
    assert all(event.is_async and event.time_range.elapsed_us() > 0 for event in events)
    assert all(event.input_shapes == [[1000]] for event in events)


@on_ranks(2)
def test_events_have_ended_when_a_profile_does(rank: int) -> None:
    """Each time an all-reduce ends shortly before the profiler does; an event that ended later would crash."""
    transport = opened()
    tensor = transport.allocate(10, torch.float32, CPU).fill_(0)
    for _ in range(40):
        with profile() as profiled:
            transport.all_reduce(tensor).wait()
        assert sum(event.name.startswith("gloo:") for event in profiled.events()) == 1
