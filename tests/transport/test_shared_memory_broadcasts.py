"""Small broadcasts among the ranks of one host: what is received, in which order, and ranks that are killed."""

from __future__ import annotations

import copy
import datetime
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import minddp
from minddp.platform.host import is_running
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory.collective import BroadcastQueue, PendingBroadcast
from minddp.transport.shared_memory.messages import MAX_BROADCAST_BYTES, Broadcast, bytes_of
from tests.ranks import RankFailure, RankPool
from tests.transport.places import Ranks, mortal_ranks, opened

# ---------------------------------------------------------------------- matching messages with calls


def expected(*shape: int) -> PendingBroadcast:
    return PendingBroadcast("broadcast 7 from rank 0", torch.zeros(shape), deadline=0.0, num_launched=5)


def sent(tensor: torch.Tensor, num_launched: int = 5) -> Broadcast:
    return Broadcast(num_launched, bytes_of(tensor))


def test_broadcasts_are_received_in_the_order_in_which_they_are_made() -> None:
    queue, calls = BroadcastQueue(), [expected(2), expected(3)]
    queue.arrived.append(sent(torch.ones(2)))
    queue.match()
    queue.expected.extend(calls)
    queue.match()
    assert [call.future.done() for call in calls] == [True, False]
    queue.arrived.append(sent(torch.full((3,), 2.0)))
    queue.match()
    assert [call.tensor.tolist() for call in calls] == [[1, 1], [2, 2, 2]]
    assert not queue.arrived
    assert not queue.expected


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (sent(torch.ones(2)), "has 8 bytes .* but 12 bytes are expected"),
        (sent(torch.ones(3), num_launched=4), "sent after 4 all-reduces, but .* after 5"),
    ],
)
def test_what_is_not_expected_is_an_error_and_not_received(message: Broadcast, words: str) -> None:
    queue, call = BroadcastQueue(), expected(3)
    queue.expected.append(call)
    queue.arrived.append(message)
    with pytest.raises(RuntimeError, match=words):
        queue.match()
    assert not call.future.done()
    assert call.tensor.tolist() == [0, 0, 0]


def odd_tensors(value: int) -> dict[str, torch.Tensor]:
    """All kinds and sizes, also some that do not go through sockets; filled with `value`."""
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.complex64]
    with torch.inference_mode():
        inference = torch.full((3,), float(value))
    return {
        "a number": torch.tensor(float(value)),
        "columns": (value * torch.arange(12.0)).view(3, 4).t(),
        "every second": torch.full((100,), float(value))[::2],
        "conjugate": torch.full((4,), complex(value, 2 * value)).conj(),
        "negative": torch.full((4,), complex(value, 2 * value)).conj().imag,
        "bool": torch.tensor([value == 1, True, value == 2]),
        "parameter": nn.Parameter(torch.full((5,), float(value))),
        "empty": torch.empty(0),
        "inference": inference,
        "largest": torch.full((MAX_BROADCAST_BYTES // 4,), float(value)),
        "too large": torch.full((MAX_BROADCAST_BYTES // 4 + 1,), float(value)),
        **{str(dtype): torch.full((7,), value, dtype=dtype) for dtype in dtypes},
    }


def tensors_not_received(rank: int, source: int) -> list[str]:
    transport = opened()
    tensors, expected = odd_tensors(rank + 1), odd_tensors(source + 1)
    by_group = ProcessGroupTransport.broadcast
    went_by_group: list[int] = []

    def counted(transport: ProcessGroupTransport, tensor: torch.Tensor, source: int) -> Any:
        went_by_group.append(tensor.nbytes)
        return by_group(transport, tensor, source)

    ProcessGroupTransport.broadcast = counted  # type: ignore[method-assign]
    try:
        for work in [transport.broadcast(tensor, source) for tensor in tensors.values()]:
            work.wait()
            assert work.is_completed()
    finally:
        ProcessGroupTransport.broadcast = by_group  # type: ignore[method-assign]
    assert went_by_group == [0, MAX_BROADCAST_BYTES + 4]
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])]


@pytest.mark.parametrize("source", [0, 2])
def test_tensors_of_all_kinds_are_received_by_all(ranks: Ranks, source: int) -> None:
    assert ranks(3).run(tensors_not_received, source) == [[]] * 3


# ---------------------------------------------------------------------- when


def broadcast_far_ahead(rank: int) -> list[float]:
    """Rank 0 makes all its broadcasts and an all-reduce before any other rank makes its calls."""
    transport = opened()
    tensors = [torch.full((10,), float(10 * rank + number)) for number in range(5)]
    if rank == 0:
        for tensor in tensors:
            assert transport.broadcast(tensor, 0).get_future().wait()[0] is not None
    total = torch.ones(3)
    if rank == 0:
        reduction = transport.all_reduce(total)
    dist.barrier()
    if rank != 0:
        for tensor in tensors:
            transport.broadcast(tensor, 0).wait()
        reduction = transport.all_reduce(total)
    reduction.wait()
    assert total.tolist() == [3, 3, 3]
    return [tensor[0].item() for tensor in tensors]


def test_the_source_waits_for_no_rank_and_its_order_is_kept(ranks: Ranks) -> None:
    assert ranks(3).run(broadcast_far_ahead) == [[0, 1, 2, 3, 4]] * 3


def receive_without_waiting(rank: int) -> list[float]:
    """What has arrived before the call, and what arrives later, is received without a wait."""
    transport, tensor = opened(), torch.full((3,), 1.0 - rank)
    if rank == 0:
        transport.broadcast(tensor, 0)
        time.sleep(0.1)  # the progress thread receives it
        dist.barrier()
        dist.barrier()
        transport.broadcast(tensor + 1, 0)
        return [1, 2]
    dist.barrier()
    early, late = torch.zeros(3), torch.zeros(3)
    first = transport.broadcast(early, 0).get_future().wait()[0].sum().item() / 3
    future = transport.broadcast(late, 0).get_future()
    dist.barrier()
    return [first, future.wait()[0].sum().item() / 3]


def test_broadcasts_are_received_with_and_without_a_wait(ranks: Ranks) -> None:
    assert ranks(2).run(receive_without_waiting) == [[1, 2]] * 2


def give_up_and_take_up_again(rank: int) -> list[Any]:
    transport, tensor = opened(), torch.full((3,), 7.0 * (rank == 0))
    if rank == 0:
        dist.barrier()
        transport.broadcast(tensor, 0).wait()
        return []
    work = transport.broadcast(tensor, 0)
    said: list[Any] = [work.is_completed()]
    with pytest.raises(RuntimeError, match=r"Timed out .* broadcast 0 from rank 0"):
        work.wait(datetime.timedelta(seconds=0.05))
    dist.barrier()
    work.wait()
    return [*said, work.is_completed(), tensor.tolist()]


def test_waiting_can_be_given_up_and_taken_up_again(ranks: Ranks) -> None:
    assert ranks(2).run(give_up_and_take_up_again)[1] == [False, True, [7, 7, 7]]


def receive_in_another_mode(rank: int) -> tuple[bool, list[float]]:
    """A tensor made in inference mode, received by a thread in another mode."""
    transport = opened()
    with torch.inference_mode():
        tensor = torch.full((3,), float(rank))
        work = transport.broadcast(tensor, 1)
        dist.barrier()
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()
        return tensor.is_inference(), tensor.tolist()


def test_modes_of_a_thread_do_not_matter(ranks: Ranks) -> None:
    assert ranks(2).run(receive_in_another_mode) == [(True, [1, 1, 1])] * 2


# ---------------------------------------------------------------------- beneath the wrapper


def buffers_like_torchs(rank: int) -> list[bool]:
    """Two modules at once over one group, with more than the sockets take in one of them."""
    torch.manual_seed(rank)  # so that they would differ without a broadcast
    modules = [
        nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)) for width in (8, 10_000)
    ]
    theirs = [NativeDDP(copy.deepcopy(module)) for module in modules]
    ours = [minddp.DistributedDataParallel(copy.deepcopy(module), transport="shared_memory") for module in modules]
    for step in range(4):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        for first, second in (ours, theirs):
            (first(inputs) * second(inputs)).sum().backward()
    return [
        torch.equal(a, b)
        for our, their in zip(ours, theirs, strict=True)
        for a, b in zip(our.buffers(), their.buffers(), strict=True)
    ]


def test_several_modules_have_torchs_buffers(ranks: Ranks) -> None:
    assert ranks(2).run(buffers_like_torchs) == [[True] * 6] * 2


# ---------------------------------------------------------------------- dying


@pytest.fixture
def mortal() -> Iterator[RankPool]:
    with mortal_ranks() as pool:
        yield pool


def die_at(rank: int, moment: str) -> None:
    """Rank 1 broadcasts three times and is killed before, between or after; or rank 2, before it receives."""
    transport = opened()
    pids = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    for number in range(3):
        if rank == 1 and (moment, number) in (("before it sends", 0), ("after it has sent", 1)):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2 and (moment, number) == ("before it receives", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.full((100,), float(10 * rank + number))
        transport.broadcast(tensor, source=1).wait()
        assert tensor.eq(10 + number).all()
        if rank == 1 and (moment, number) == ("before it receives", 0):
            while is_running(pids[2]):  # or it would be through before
                time.sleep(0.01)
            time.sleep(0.5)  # for the thread that notices it


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("before it sends", "Rank 1 was killed before broadcast 0 from rank 1 was done"),
        ("after it has sent", "Rank 1 was killed before broadcast 1 from rank 1 was done"),
    ],
)
def test_the_end_of_the_source_is_noticed_once_its_messages_are_received(
    mortal: RankPool, moment: str, said: str
) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_at, moment)
    reports = failure.value.reports
    assert "exit code -9" in reports[1]
    assert all(said in reports[rank] for rank in (0, 2))


def test_the_end_of_a_receiver_is_noticed_by_the_next_broadcast(mortal: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        mortal.run(die_at, "before it receives")
    assert "exit code -9" in failure.value.reports[2]
    assert "Rank 2 was killed before a broadcast was done" in failure.value.reports[1]


def sleep_before_sending(rank: int) -> None:
    transport = opened()
    if rank == 1:
        time.sleep(20)
    transport.broadcast(torch.ones(3), source=1).wait()


def test_a_late_source_has_the_time_limit_of_the_group() -> None:
    with mortal_ranks(group_timeout_s=3.0, grace_s=1.0) as pool, pytest.raises(RankFailure) as failure:
        pool.run(sleep_before_sending)
    assert any(
        "Broadcast 0 from rank 1 has not come within 3 s" in failure.value.reports[rank] for rank in (0, 2)
    ), failure.value.reports


def receive_another_size(rank: int) -> str:
    transport = opened()
    try:
        transport.broadcast(torch.ones(3 + rank), source=0).wait()
        transport.all_reduce(torch.ones(3)).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_other_sizes_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    for said in ranks(2).run(receive_another_size):
        assert "broadcast 0 from rank 0 has 12 bytes" in said


def evaluate_on_one_rank(rank: int) -> str:
    """A mistake: rank 0 goes through the wrapper while the others do not. Then training goes on."""
    ddp = minddp.DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), transport="shared_memory", stuck_after_s=None
    )
    ddp(torch.ones(4, 3)).sum().backward()
    if rank == 0:
        ddp(torch.ones(4, 3))
    try:
        for _ in range(2):
            ddp(torch.ones(4, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_broadcast_too_many_is_not_taken_for_the_next(ranks: Ranks) -> None:
    for said in ranks(2).run(evaluate_on_one_rank):
        assert re.search(r"sent after (\d+) all-reduces, but .* after (?!\1)", said), said
