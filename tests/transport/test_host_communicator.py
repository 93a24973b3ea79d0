from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from minddp.transport.backend import SharedWork
from minddp.transport.shared_memory import collectives, host_communicator, peer_sockets, segments
from minddp.transport.shared_memory.control_block import NUM_CALLS, Call, ControlBlock, Kind
from minddp.transport.shared_memory.host_communicator import MESSAGES_EVERY, HostCommunicator
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import SpinWait
from tests.transport.threads import connected, control_blocks


class Rank:
    """A communicator, and `numel` float32 in shared memory."""

    def __init__(self, rank: int, peers: dict, control: Segment, numel: int = 1000, limit_s: float = 10.0):
        self.limit_s = limit_s
        self.host = HostCommunicator(rank, peers, control, range(len(peers) + 1), SpinWait(0.0))
        self.tensor = self.host.allocate(numel, torch.float32)

    def launch(self, start: int = 0, stop: int | None = None) -> SharedWork:
        return self.all_reduce(self.tensor[start:stop])

    def all_reduce(self, tensor: torch.Tensor) -> SharedWork:
        call = Call(Kind.ALL_REDUCE, tensor.dtype, tensor.numel(), 0)
        collective = self.host.launch(
            collectives.all_reduce, call, tensor, tensor, limit_s=self.limit_s, in_place=True, is_waited_for=False
        )
        return SharedWork(self.host, collective, [tensor])

    def leave(self) -> None:
        self.host.end()


def start_ranks(world_size: int, **kwargs) -> list[Rank]:
    both = zip(connected(world_size), control_blocks(world_size), strict=True)
    return [Rank(rank, peers, control, **kwargs) for rank, (peers, control) in enumerate(both)]


@pytest.fixture
def start():
    """`start(n)` are n connected ranks."""
    started: list[Rank] = []

    def keep(world_size: int, **kwargs) -> list[Rank]:
        started.extend(start_ranks(world_size, **kwargs))
        return started

    yield keep
    for rank in started:
        rank.leave()
    assert not [thread for thread in threading.enumerate() if thread.name == "minddp shared memory"]


Start = Callable[..., list[Rank]]


def happens(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def test_more_can_be_in_flight_than_the_control_block_has_calls(start: Start) -> None:
    """Before any rank waits."""
    assert NUM_CALLS < 2000
    ranks = start(2)
    for rank in ranks:
        rank.tensor.fill_(1)
    works: list[list[SharedWork]] = [[], []]

    def launch_all(rank: int) -> None:
        works[rank] = [ranks[rank].launch(i % 1000, i % 1000 + 1) for i in range(2000)]

    threads = [threading.Thread(target=launch_all, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for work in works[0] + works[1]:
        work.wait()
    assert ranks[0].tensor.eq(4).all()


def test_a_late_rank_is_named_when_time_is_up(start: Start) -> None:
    ranks = start(3, limit_s=0.2)
    works = [rank.launch() for rank in ranks[:2]]
    for work in works:
        with pytest.raises(RuntimeError, match=r"Rank 2 has not begun all_reduce 0 within the timeout of 0.2 s"):
            work.wait()
    with pytest.raises(RuntimeError, match="Rank 2 has not begun all_reduce 0"):
        ranks[0].launch().wait()


def test_a_rank_that_leaves_while_others_wait_is_named(start: Start) -> None:
    ranks = start(3)
    works = [rank.launch() for rank in ranks[:2]]
    ranks[2].leave()
    for work in works:
        with pytest.raises(RuntimeError, match="Rank 2 has left before all_reduce 0"):
            work.wait()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_rank_whose_last_message_has_been_read_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
) -> None:
    """No further event would wake a thread that sleeps."""
    monkeypatch.setattr(host_communicator, "GRACE_S", 60.0)
    ranks = start(2, limit_s=60.0)
    ranks[1].leave()
    assert happens(lambda: 1 in ranks[0].host._engine.ended)
    work = ranks[0].launch()
    if is_waited_for:
        threading.Thread(target=ranks[0].host.wait_for, args=(work._collective,)).start()
    assert happens(work.is_completed)
    with pytest.raises(RuntimeError, match="Rank 1 has left before all_reduce 0"):
        work.wait()


def test_a_rank_that_will_look_by_itself_is_not_woken(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_communicator, "PROGRESS_DELAY_S", 60.0)
    ranks, woken = start(2), []
    works = [rank.launch() for rank in ranks]
    assert happens(lambda: ranks[0].host._progress.will_look)
    with monkeypatch.context() as patched:
        patched.setattr(peer_sockets.PeerSockets, "wake", lambda _, others: woken.extend(others))
        works += [rank.launch() for rank in ranks]
    assert 0 not in woken
    for rank, work in zip(ranks * 2, works, strict=True):
        rank.host.hurry(work._collective)
    for work in works:
        work.wait()


def test_a_rank_may_leave_after_its_part_is_done(start: Start) -> None:
    ranks = start(2)
    for rank in ranks:
        rank.tensor.fill_(1)
    theirs, ours = ranks[1].launch(), ranks[0].launch()
    theirs.wait()
    ranks[1].leave()
    ours.wait()
    assert ranks[0].tensor.eq(2).all()


@pytest.mark.parametrize("waiting_rank", [0, 1])
def test_a_waiting_rank_does_its_part_and_the_progress_thread_that_of_the_others(
    start: Start, monkeypatch: pytest.MonkeyPatch, waiting_rank: int
) -> None:
    adding: dict[int, str] = {}

    def note_thread(addends: list, chunk: int) -> None:
        adding[chunk] = threading.current_thread().name

    monkeypatch.setattr(host_communicator, "PROGRESS_DELAY_S", 60.0)
    ranks = start(2)
    monkeypatch.setattr(collectives, "all_reduce_chunk", note_thread)
    works = [rank.launch() for rank in ranks]
    ranks[1 - waiting_rank].host.hurry(works[1 - waiting_rank]._collective)
    works[waiting_rank].wait()
    assert adding == {waiting_rank: threading.current_thread().name, 1 - waiting_rank: "minddp shared memory"}


def test_several_threads_may_wait(start: Start) -> None:
    ranks = start(2)
    ours = [ranks[0].launch(i, i + 1) for i in range(3)]
    threads = [threading.Thread(target=work.wait) for work in reversed(ours)]
    for thread in threads:
        thread.start()
    for _, i in zip(threads, range(3), strict=True):
        ranks[1].launch(i, i + 1).wait()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_an_interrupted_addition_is_an_error_and_not_half_a_sum(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_communicator, "PROGRESS_DELAY_S", 60.0)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    ranks = start(2)
    works = [rank.launch() for rank in ranks]
    with monkeypatch.context() as patch:
        patch.setattr(collectives, "all_reduce_chunk", interrupt)
        with pytest.raises(KeyboardInterrupt):
            works[0].wait()
    for work in works:
        with pytest.raises(RuntimeError, match=r"Rank 0 cannot continue .*KeyboardInterrupt"):
            work.wait()


def test_peers_get_a_long_error_shortened(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_rank_0(addends: list, chunk: int) -> None:
        if chunk == 0:
            raise MemoryError("é" * 5000)

    monkeypatch.setattr(collectives, "all_reduce_chunk", fail_on_rank_0)
    errors = []
    for work in [rank.launch() for rank in start(2)]:
        with pytest.raises(RuntimeError, match="Rank 0 cannot continue its collectives: MemoryError") as error:
            work.wait()
        errors.append(str(error.value))
    assert len(errors[0]) > 5000
    assert errors[1] == errors[0][: peer_sockets.MAX_REASON_CHARACTERS]


def test_a_forked_child_leaves_its_parents_thread_alone(start: Start) -> None:
    ranks = start(2)
    child = os.fork()
    if child == 0:
        for rank in ranks:
            rank.leave()
        os._exit(0)
    os.waitpid(child, 0)
    for work in [rank.launch() for rank in ranks]:
        work.wait()


def test_closing_is_noticed_even_if_a_forked_child_has_copies_of_the_sockets(start: Start) -> None:
    ranks = start(2)
    works = [ranks[0].launch()]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is through
        os._exit(0)
    ranks[1].leave()
    with pytest.raises(RuntimeError, match="Rank 1 has left"):
        works[0].wait()
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)


def test_the_peers_unmap_a_dropped_segment(start: Start) -> None:
    ranks = start(2)
    for rank in ranks:
        rank.host.allocate(10, torch.float32)
    gc.collect()
    for _ in range(MESSAGES_EVERY + 2):
        for work in [rank.launch() for rank in ranks]:
            work.wait()
    assert [sorted(rank.host._engine._peer_memory._segments) for rank in ranks] == [[(1, 0)], [(0, 0)]]


def test_closing_ends_a_wait_of_another_thread(start: Start) -> None:
    ranks = start(2)
    errors: list[str] = []

    def wait(work: SharedWork) -> None:
        with pytest.raises(RuntimeError) as error:
            work.wait()
        errors.append(str(error.value))

    thread = threading.Thread(target=wait, args=(ranks[0].launch(),))
    thread.start()
    time.sleep(0.1)
    ranks[0].leave()
    thread.join(5)
    assert errors == [host_communicator.DESTROYED]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_source_that_runs_ahead_of_a_rank_does_not_wait_forever(start: Start, leaves: bool) -> None:
    """It waits for no other rank, except for room in the control block."""
    ranks = start(2)
    if leaves:
        ranks[1].leave()
    source = torch.ones(10)
    call = Call(Kind.BROADCAST, source.dtype, source.numel(), 0)
    late = "Rank 1 has still to finish collective 0, 256 before broadcast 256, after 1 s"
    with pytest.raises(RuntimeError, match="Rank 1 has left" if leaves else late):
        for _ in range(NUM_CALLS + 1):
            collective = ranks[0].host.launch(
                collectives.broadcast, call, source, source, 0, limit_s=1.0, in_place=True, is_waited_for=True
            )
            SharedWork(ranks[0].host, collective, [source]).wait()


def test_nothing_is_read_that_a_failed_rank_may_have_overwritten(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is so late with its part that rank 0 has given up, and uses its tensor again."""
    monkeypatch.setattr(host_communicator, "PROGRESS_DELAY_S", 60.0)
    ranks = start(2, limit_s=0.5)
    works = [rank.launch() for rank in ranks]
    words = "Rank 1 has begun all_reduce 0 and not finished it within the timeout of 0.5 s"
    with ranks[1].host._turn:
        with pytest.raises(RuntimeError, match=words):
            works[0].wait()
        ranks[0].tensor.fill_(100)
    with pytest.raises(RuntimeError, match=words):
        works[1].wait()
    assert ranks[0].tensor.eq(100).all()  # nor written


def test_nothing_is_read_that_a_rank_may_have_overwritten_since_it_left(start: Start) -> None:
    ranks = start(2)

    def all_gather(rank: Rank, tensor: torch.Tensor) -> SharedWork:
        outputs = [torch.empty_like(tensor) for _ in range(2)]
        call = Call(Kind.ALL_GATHER, tensor.dtype, tensor.numel())
        collective = rank.host.launch(
            collectives.all_gather, call, tensor, tensor, outputs, limit_s=5.0, in_place=True, is_waited_for=False
        )
        return SharedWork(rank.host, collective, outputs)

    work = all_gather(ranks[0], ranks[0].tensor)
    ranks[0].leave()
    with pytest.raises(RuntimeError, match="was destroyed"):
        work.wait()
    ranks[0].tensor.fill_(100)
    with pytest.raises(RuntimeError, match="Rank 0 has left before"):
        all_gather(ranks[1], torch.ones(1000)).wait()


def test_a_thread_that_waits_learns_of_a_failure_in_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = start(2, limit_s=60.0)
    work, errors = ranks[0].launch(), []

    def wait() -> None:
        with pytest.raises(RuntimeError) as error:
            work.wait()
        errors.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    monkeypatch.setattr(segments, "create", lambda _: _no_memory())
    with pytest.raises(RuntimeError, match="no room"):
        ranks[0].all_reduce(torch.ones(10))
    thread.join(5)
    assert "no room" in errors[0]


def _no_memory() -> int:
    raise OSError(12, "Cannot allocate memory")


def test_memory_that_cannot_be_mapped_is_an_error_on_every_rank(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start(2)
    attach = segments.attach

    def attach_own(descriptor: int, nbytes: int, number: int) -> Segment:
        if threading.current_thread().name == "minddp shared memory":
            raise OSError("no memory is left")
        return attach(descriptor, nbytes, number)

    monkeypatch.setattr(segments, "attach", attach_own)
    tensors = [rank.host.allocate(10, torch.float32) for rank in ranks]
    time.sleep(0.2)  # for the progress threads to have their turn
    for rank, tensor in zip(ranks, tensors, strict=True):
        with pytest.raises(RuntimeError, match=r"Rank \d cannot map memory of rank \d: no memory is left"):
            rank.all_reduce(tensor).wait()


def test_a_callback_that_raises_stops_no_other(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ranks = start(2)
    called = threading.Event()
    works = [rank.launch() for rank in ranks]
    works[0].call_when_done(lambda: 1 / 0)
    works[0].call_when_done(called.set)
    works[1].wait()
    works[0].wait()
    assert called.wait(5)
    assert "A callback of all_reduce 0 has raised" in caplog.text
    for work in [rank.launch() for rank in ranks]:
        work.wait()


def test_a_finalizer_that_waits_inside_a_turn_is_refused_and_takes_nothing(start: Start) -> None:
    ranks = start(2)
    work = ranks[0].launch()
    with ranks[0].host._turn:
        with pytest.raises(RuntimeError, match="A signal handler uses a process group"):
            work.wait()
        assert ranks[0].host._turn._is_owned()
    for each in (ranks[1].launch(), work):
        each.wait()


def test_threads_may_allocate_at_the_same_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = start(2)
    attach = segments.attach

    def attach_slowly(descriptor: int, nbytes: int, number: int) -> Segment:
        time.sleep(0.001)
        return attach(descriptor, nbytes, number)

    monkeypatch.setattr(segments, "attach", attach_slowly)
    made: list[torch.Tensor] = []

    def allocate() -> None:
        made.extend(ranks[0].host.allocate(8, torch.float32) for _ in range(10))

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({segment.number for segment in ranks[0].host._engine.own_memory._by_address.values()}) == 1 + 4 * 10


def test_a_copy_is_not_used_again_before_its_result_has_been_copied_back(start: Start) -> None:
    """All ranks are done, but this one has not looked yet, when it launches the next."""
    ranks = start(2)
    first = [torch.full((100_000,), rank + 1.0) for rank in range(2)]
    works = [rank.all_reduce(tensor) for rank, tensor in zip(ranks, first, strict=True)]
    works[1].wait()
    with ranks[0].host._turn:  # the thread of rank 0 has not got so far
        thread = threading.Thread(target=lambda: works.append(ranks[0].all_reduce(torch.zeros(100_000))))
        thread.start()
        thread.join(10)
    works.append(ranks[1].all_reduce(torch.zeros(100_000)))
    for work in works:
        work.wait()
    assert first[0].eq(3).all()
    assert first[1].eq(3).all()


def test_a_collective_that_nobody_waits_for_fails_in_time_on_a_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message has woken the progress thread yet."""
    monkeypatch.setattr(host_communicator, "GRACE_S", 0.3)
    both = enumerate(zip(connected(2), control_blocks(2), strict=True))
    hosts = [HostCommunicator(rank, peers, control, range(2), SpinWait(0.0)) for rank, (peers, control) in both]
    call = Call(Kind.BARRIER, torch.uint8, 0)
    collective = hosts[0].launch(collectives.barrier, call, None, limit_s=0.1, in_place=True, is_waited_for=False)
    assert happens(lambda: collective.is_done)
    assert "Rank 1 has not begun barrier 0" in str(collective.error)
    for host in hosts:
        host.end()


def test_a_failure_whose_message_is_lost_is_one(start: Start) -> None:
    ranks = start(2)
    ranks[1].host._engine.control.fail_from(0)
    work, _ = ranks[0].launch(), ranks[1].launch()
    with pytest.raises(RuntimeError, match=r"Rank 1 has failed before collective 0\. Its output shows why"):
        work.wait()


def test_calls_after_a_failure_take_no_memory(start: Start) -> None:
    ranks = start(2, limit_s=0.1)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="Rank 1 has not begun all_reduce 0"):
            ranks[0].all_reduce(torch.ones(10)).wait()
    assert len(ranks[0].host._engine.own_memory._staging) == 1


def test_a_dropped_group_completes_what_is_in_flight(start: Start) -> None:
    """As gloo's destructor does. The last reference goes while the other rank has not called it yet."""
    ranks = start(2)
    ranks[0].launch()
    tensor, progress = ranks[0].tensor.fill_(1), ranks[0].host._progress
    del ranks[0].host
    gc.collect()
    ranks[1].tensor.fill_(2)
    ranks[1].launch().wait()
    assert tensor.eq(3).all()
    assert happens(lambda: not progress.is_alive())
    del ranks[0]


def test_a_signal_handler_that_closes_the_group_in_a_wait_is_not_held_up(start: Start) -> None:
    ranks = start(2)
    with ranks[0].host._turn:  # as in a wait that the handler has interrupted
        began = time.monotonic()
        ranks[0].host.end()
        assert time.monotonic() - began < host_communicator.GRACE_S / 2


def test_the_first_failed_collective_is_not_forgotten() -> None:
    control, other = (ControlBlock(memory, 2, rank) for rank, memory in enumerate(control_blocks(2)))
    control.fail_from(5)
    control.fail_from(7)
    assert [list(other.failed_before(number)) for number in (5, 6)] == [[], [0]]


def test_the_thread_adds_alone() -> None:
    """Torch would wake a team of threads for long tensors, one team for each thread that adds."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        ranks = start_ranks(2, numel=3_000_000)
        num_threads = len(os.listdir("/proc/self/task"))
        for work in [rank.launch() for rank in ranks]:
            work.wait()
        assert len(os.listdir("/proc/self/task")) == num_threads
        for rank in ranks:
            rank.leave()
    finally:
        torch.set_num_threads(before)
