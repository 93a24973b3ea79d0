"""The NCCL transport against a stand-in: what is called, in which order, and what ends it.

What it fences, and its values: tests/simulated_device. With NCCL itself and a GPU: tests/gpu/.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp.transport import open_transport
from minddp.transport.nccl import NcclTransport, communicator, nccl_transport
from minddp.transport.nccl.communicator import Communicator
from minddp.transport.nccl.nccl_transport import call_on_device, share_unique_id
from minddp.transport.process_group import ProcessGroupTransport

CPU = torch.device("cpu")
FLOAT32 = 7  # NCCL's own number


class Group:
    """As much of a ProcessGroupTransport as is used."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None = None):
        self.rank, self.world_size, self.store = rank, world_size, store
        self.group = self


def init_without_backend(transport: ProcessGroupTransport, group: Any) -> None:
    transport.rank, transport.world_size, transport.store = group.rank, group.world_size, group.store


class Stream:
    """Notes what it is asked for, in order. All of it is done once the device is idle."""

    def __init__(self, gpu: FakeGpu, number: int):
        self.gpu, self.cuda_stream = gpu, number
        self.asked: list[str] = []

    def record_event(self) -> SimpleNamespace:
        self.asked.append("record")
        return SimpleNamespace(query=lambda: self.gpu.is_idle)

    def wait_event(self, _event: object) -> None:
        self.asked.append("wait")


class FakeGpu:
    """Stands in for `torch.cuda`, for `cupy.cuda.nccl`, and for its communicator."""

    NCCL_SUM, NCCL_FLOAT32 = 0, FLOAT32

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.streams: list[Stream] = []
        self.current = self.new_stream()
        self.is_idle = self.is_capturing = False
        self.calls: list[tuple[Any, ...]] = []
        self.kept: list[tuple[int, int]] = []  # (address, stream) of `record_stream`
        self.refuses = self.async_error = self.ended_by = ""
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, s: self.kept.append((tensor.data_ptr(), s.cuda_stream))
        )
        monkeypatch.setattr(ProcessGroupTransport, "__init__", init_without_backend)
        monkeypatch.setattr(ProcessGroupTransport, "all_reduce", lambda *_: "the group's work")

    def new_stream(self, _device: object = None) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def transport(self, limit_s: float = 60.0) -> NcclTransport:
        link = Communicator(self, CPU, contextlib.nullcontext, limit_s)
        return NcclTransport(Group(0, 1), self, link)  # type: ignore[arg-type]

    def _call(self, name: str, source: int, target: int, *arguments: int) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        assert source == target, "in place"
        self.calls.append((name, *arguments))
        self.streams[arguments[-1]].asked.append("kernel")

    def allReduce(self, *arguments: int) -> None:
        self._call("allReduce", *arguments)

    def broadcast(self, *arguments: int) -> None:
        self._call("broadcast", *arguments)

    def allGather(self, *arguments: int) -> None:
        self.calls.append(("allGather", *arguments))

    def check_async_error(self) -> None:
        if self.async_error:
            raise RuntimeError(self.async_error)

    def abort(self) -> None:
        self.ended_by = "abort"

    def destroy(self) -> None:
        self.ended_by = "destroy"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(communicator, "CHECK_EVERY_S", 3600.0)  # tests call check() themselves
    return FakeGpu(monkeypatch)


# ------------------------------------------------------------------ calls


def test_an_all_reduce_is_one_call_in_place_on_a_stream_of_its_own(gpu: FakeGpu) -> None:
    link, bucket = gpu.transport(), torch.ones(6)
    work = link.all_reduce(bucket)
    own = link._communicator.stream
    assert own is not gpu.current
    assert gpu.calls == [("allReduce", 6, FLOAT32, FakeGpu.NCCL_SUM, own.cuda_stream)]
    assert gpu.current.asked == ["record"], "the caller's stream is not to wait before wait()"
    assert own.asked == ["wait", "kernel", "record"]
    assert gpu.kept == [(bucket.data_ptr(), own.cuda_stream)], "its memory must not be given away before it is done"
    work.wait()
    assert gpu.current.asked == ["record", "wait"]


def test_a_broadcast_names_its_source(gpu: FakeGpu) -> None:
    gpu.transport().broadcast(torch.ones(2), source=2)
    assert gpu.calls == [("broadcast", 2, FLOAT32, 2, 1)]


def test_an_all_gather_sends_its_tensor_and_fills_another(gpu: FakeGpu) -> None:
    own = torch.ones(2)
    [gathered] = gpu.transport().all_gather(own)
    assert gpu.calls == [("allGather", own.data_ptr(), gathered.data_ptr(), 2, FLOAT32, 1)]


def test_a_call_that_nccl_refuses_is_named(gpu: FakeGpu) -> None:
    gpu.refuses = "NCCL_ERROR_INVALID_ARGUMENT: made up"
    with pytest.raises(
        RuntimeError, match=r"NCCL refused allReduce of 2 elements of torch.float32: .*INVALID_ARGUMENT"
    ):
        gpu.transport().all_reduce(torch.ones(2))


def test_what_nccl_does_not_carry_is_left_to_the_group(gpu: FakeGpu) -> None:
    link, sparse, flags = gpu.transport(), torch.eye(2).to_sparse(), torch.tensor([True])
    assert [link.all_reduce(sparse), link.all_reduce(flags)] == ["the group's work"] * 2


def test_a_callback_is_called_at_once_behind_the_collective(gpu: FakeGpu) -> None:
    """What the x-ray stamps there is the moment of completion on the device."""
    link, caller = gpu.transport(), gpu.current
    link.all_reduce(torch.ones(1)).call_when_done(lambda: torch.cuda.current_stream().record_event())
    assert link._communicator.stream.asked == ["wait", "kernel", "record", "record"]
    assert gpu.current is caller


def test_a_wait_has_no_timeout(gpu: FakeGpu) -> None:
    with pytest.raises(AssertionError, match="the device waits"):
        gpu.transport().all_reduce(torch.ones(1)).wait(datetime.timedelta(seconds=0.01))


# ------------------------------------------------------------------ what no call can tell


def test_what_is_complete_is_forgotten(gpu: FakeGpu) -> None:
    link = gpu.transport()
    for _ in range(3):
        link.all_reduce(torch.ones(1))
    link._communicator.check()
    assert len(link._communicator._in_flight) == 3
    gpu.is_idle = True
    link._communicator.check()
    assert len(link._communicator._in_flight) == 0


def test_a_collective_that_takes_too_long_is_given_up(gpu: FakeGpu) -> None:
    link = gpu.transport(limit_s=0.0)
    work = link.all_reduce(torch.ones(7))
    time.sleep(0.001)
    link._communicator.check()
    assert gpu.ended_by == "abort"
    for act in (work.wait, lambda: link.all_reduce(torch.ones(7)), lambda: link.broadcast(torch.ones(1), 0)):
        with pytest.raises(RuntimeError, match=r"allReduce of 7 elements .* not complete after 0 s.*checkpoint"):
            act()


def test_a_connection_that_broke_is_noticed(gpu: FakeGpu) -> None:
    link = gpu.transport()
    gpu.async_error = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
    link._communicator.check()
    assert gpu.ended_by == "abort"
    with pytest.raises(RuntimeError, match=r"NCCL reports NCCL_ERROR_REMOTE_ERROR.*a rank has ended"):
        link.all_reduce(torch.ones(1))


def test_the_thread_asks_only_with_the_device_current(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank would set up the host's first GPU as well, with some hundred MiB of its memory."""
    monkeypatch.setattr(communicator, "CHECK_EVERY_S", 0.01)
    asked, is_current = [], threading.Event()

    @contextlib.contextmanager
    def on_device() -> Iterator[None]:
        is_current.set()
        yield
        is_current.clear()

    def ask() -> None:
        asked.append(is_current.is_set())

    monkeypatch.setattr(communicator, "_allow_captures", ask)
    monkeypatch.setattr(Communicator, "check", lambda _comm: ask())
    comm = Communicator(gpu, CPU, on_device, limit_s=60)
    deadline = time.monotonic() + 60
    while len(asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asked[:3] == [True] * 3
    assert comm.failure is None


def test_an_abort_ends_a_stuck_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for a peer holds the lock; only the abort ends it, and then the call says why."""
    monkeypatch.setattr(communicator, "CALL_GRACE_S", 0.05)
    link = gpu.transport()
    is_in_call, aborted, set_free = threading.Event(), threading.Event(), []

    def stuck(*_: object) -> None:
        is_in_call.set()
        set_free.append(aborted.wait(60))
        raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR")

    monkeypatch.setattr(gpu, "allReduce", stuck)
    monkeypatch.setattr(gpu, "abort", aborted.set)
    errors: list[str] = []

    def call() -> None:
        try:
            link.all_reduce(torch.ones(1))
        except RuntimeError as error:
            errors.append(str(error))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    is_in_call.wait(60)
    link._communicator.abort("a rank has ended")
    caller.join(60)
    assert set_free == [True], "the abort waited for the call that it was to end"
    assert errors[0].startswith("a rank has ended. The communicator has been aborted")


def test_what_is_captured_is_never_asked_whether_it_is_complete(gpu: FakeGpu) -> None:
    gpu.is_capturing, link = True, gpu.transport()
    link.all_reduce(torch.ones(1))
    assert not link._communicator._in_flight


@pytest.mark.parametrize(("is_complete", "ended_by"), [(True, "destroy"), (False, "abort")])
def test_closing_does_not_wait_for_ranks_that_may_never_come(
    is_complete: bool, ended_by: str, gpu: FakeGpu
) -> None:
    link = gpu.transport()
    link.all_reduce(torch.ones(1))
    gpu.is_idle = is_complete
    del link
    gc.collect()
    assert gpu.ended_by == ended_by


def test_joining_has_a_time_limit_and_passes_errors_on() -> None:
    with pytest.raises(RuntimeError, match=r"NCCL did not connect them within 0\.05 s.*NCCL_SOCKET_IFNAME"):
        call_on_device(lambda: time.sleep(5), contextlib.nullcontext, limit_s=0.05)

    def fails() -> None:
        raise ValueError("NCCL_ERROR_SYSTEM_ERROR")

    with pytest.raises(RuntimeError, match="NCCL did not connect the ranks: NCCL_ERROR_SYSTEM_ERROR"):
        call_on_device(fails, contextlib.nullcontext, limit_s=5)
    assert call_on_device(lambda: "a handle", contextlib.nullcontext, limit_s=5) == "a handle"


# ------------------------------------------------------------------ meeting


def _meet_all(errors: list[str | None], limit_s: float = 20.0, store: dist.Store | None = None) -> list[Any]:
    """What `share_unique_id` returns, or raises, on each rank; those with `None` do not come."""
    store, made = store or dist.HashStore(), [0]
    outcomes: list[Any] = [None] * len(errors)

    def make_id() -> bytes:
        made[0] += 1
        return bytes([200, made[0]]) * 64

    def rank_body(rank: int, error: str) -> None:
        try:
            outcomes[rank] = share_unique_id(store, Group(rank, len(errors)), error, make_id, limit_s)  # type: ignore[arg-type]
        except Exception as raised:
            outcomes[rank] = raised

    threads = [
        threading.Thread(target=rank_body, args=(rank, error), daemon=True)
        for rank, error in enumerate(errors)
        if error is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def test_rank_0_makes_the_unique_id_and_all_others_fetch_it() -> None:
    assert _meet_all(["", "", ""]) == [bytes([200, 1]) * 64] * 3


def test_a_second_communicator_does_not_take_the_last_id() -> None:
    store = dist.HashStore()
    _meet_all(["", ""], store=store)
    outcomes = _meet_all([None, ""], limit_s=0.2, store=store)
    assert "no answer from rank 0 within 0.2 s." in str(outcomes[1])


def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    for outcome in _meet_all(["", "CuPy is not installed; pip install"]):
        assert isinstance(outcome, RuntimeError)
        assert "cannot be used on rank 1: CuPy is not installed" in str(outcome)


@pytest.mark.parametrize("unique_id", [bytes(range(128, 256)), tuple(range(-128, 0))])
def test_the_unique_id_arrives_as_cupy_made_it(unique_id: bytes | tuple[int, ...]) -> None:
    """Before CuPy 14 it is a tuple of signed chars."""
    assert share_unique_id(dist.HashStore(), Group(0, 1), "", lambda: unique_id, 5) == unique_id  # type: ignore[arg-type]


# ------------------------------------------------------------------ what is missing


def test_tensors_on_the_cpu_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"adds on NVIDIA GPUs, but the module is on cpu.*process_group"):
        nccl_transport.connect_gpus(Group(0, 1, dist.HashStore()), CPU)  # type: ignore[arg-type]


def test_without_cuda_in_torch_it_says_which_torch_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ImportError, match="install torch for CUDA"):
        nccl_transport.import_cupy()


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(ImportError, match=r"CuPy is not installed.*pip install 'minddp\[cuda13\]'"):
        nccl_transport.import_cupy()


def test_a_cupy_for_another_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        @staticmethod
        def runtimeGetVersion() -> int:
            return 12090

    fake = type("Cupy", (), {"cuda": type("Cuda", (), {"runtime": Runtime})})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    with pytest.raises(ImportError, match=r"CuPy is made for CUDA 12 and torch for CUDA 13.*cupy-cuda12x.*cuda13"):
        nccl_transport.import_cupy()


def test_a_rank_without_cupy_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised where the ranks exchange the id, on all alike, not by the import, on this one alone."""

    def no_cupy() -> None:
        raise ImportError("CuPy is not installed; pip install it")

    monkeypatch.setattr(nccl_transport, "import_cupy", no_cupy)
    group = Group(0, 1, dist.HashStore())
    with pytest.raises(RuntimeError, match="cannot be used on rank 0: CuPy is not installed"):
        nccl_transport.connect_gpus(group, torch.device("cuda", 0))  # type: ignore[arg-type]


def test_a_group_without_a_store_is_refused() -> None:
    with pytest.raises(RuntimeError, match="connect through the store"):
        nccl_transport.connect_gpus(Group(0, 1), torch.device("cuda", 0))  # type: ignore[arg-type]


def test_it_is_opened_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name leads to `connect_gpus`, here as far as its first question."""
    monkeypatch.setattr(ProcessGroupTransport, "__init__", lambda self, group: None)
    with pytest.raises(ValueError, match="adds on NVIDIA GPUs"):
        open_transport("nccl", None)  # type: ignore[arg-type]
