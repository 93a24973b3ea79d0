"""The c10d backend "minddp": collectives of CPU tensors in shared memory, everything else by gloo.

`import minddp` registers it. Then `init_process_group("minddp")` and `new_group(backend="minddp")` make groups of
it: for torch's own DDP, FSDP2, DTensor and any script. Ranks that cannot share memory use gloo.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import isfunction
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._compile import _disable_dynamo

from minddp.platform import wording
from minddp.transport.hierarchical import Lane, all_reduce_across
from minddp.transport.process_group import time_limit_s
from minddp.transport.shared_memory import collectives, rendezvous
from minddp.transport.shared_memory.collectives import SMALL_BYTES
from minddp.transport.shared_memory.control_block import DTYPES, Call, Kind
from minddp.transport.shared_memory.host_communicator import GRACE_S, HostCommunicator
from minddp.transport.shared_memory.progress_engine import FOREVER, Collective
from minddp.transport.shared_memory.rendezvous import CannotConnect

NAME = "minddp"
MAX_SMALL_WORKS = 1024
CPU = torch.device("cpu")
NOT_BEFORE_A_BARRIER = ("send", "recv", "recv_anysource", "monitored_barrier")  # which gloo's does not wait for
#: Tensors of the caller that are written: each as a flat tensor, which may be a copy, and as it is.
Outputs = Sequence[tuple[torch.Tensor, torch.Tensor]]
_Kind = TypeVar("_Kind")
_log = logging.getLogger(__name__)
_Base: Any = dist.ProcessGroup  # torch's stub leaves out or types otherwise much of what a group has


def register() -> None:
    """Make the backend known to torch, once."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])


def make_group(options: Any, _: object = None) -> SharedMemoryGroup:
    """Create the group on this rank. Torch calls this function on each rank of a new group.

    Raises:
        ValueError: other devices have other backends, as in "cpu:minddp,cuda:nccl".
    """
    _require_cpu_alone(sys._getframe(1).f_locals.get("backend_config"))
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    gloo = c10d.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
    try:
        return connect_group(store, gloo, across_hosts=True)
    except CannotConnect as reason:
        if rank == 0:
            _log.info("This group uses gloo alone, not shared memory: %s.", reason)
        return SharedMemoryGroup(gloo, host=None)


def _require_cpu_alone(config: Any) -> None:
    """Torch would drop the backends of other devices without a word: a group in Python takes the place of all.

    It does not pass the configuration, so this reads it where torch makes the group.
    """
    others = (
        dict(config.get_device_backend_map()) if isinstance(config, dist.distributed_c10d.BackendConfig) else {}
    )
    others.pop("cpu", None)
    if others:
        device, name = next(iter(others.items()))
        raise ValueError(
            f'The backend "{NAME}" is for tensors on the CPU, and torch {torch.__version__} cannot combine it with '
            f'{name} for {device}. Pass backend="{NAME}" to a new_group of its own.'
        )


def _not_compiled(kind: type[_Kind]) -> type[_Kind]:
    """torch.compile would trace these methods where torch's wrapper calls them, and cannot."""
    for name, method in [*vars(kind).items()]:
        if isfunction(method) and (name[0] != "_" or name in ("_allgather_base", "_reduce_scatter_base")):
            setattr(kind, name, _disable_dynamo(method))
    return kind


@_not_compiled
class SharedWork(dist.Work):
    """A collective in shared memory, for its caller."""

    def __init__(
        self,
        host: HostCommunicator,
        collective: Collective,
        result: list[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
    ):
        super().__init__()
        self._host = host
        self._collective = collective
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        self.has_been_waited_for = False
        is_profiled = torch.autograd._profiler_enabled()
        self._event_has_ended = _record_event(host, collective, inputs) if is_profiled else None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Return once the result may be used. After a timeout the collective goes on.

        Raises:
            RuntimeError: a peer has ended or has made another call, or a time limit has passed.
        """
        limit_s = timeout.total_seconds()
        if not self._host.wait_for(self._collective, limit_s if limit_s > 0 else FOREVER):
            raise RuntimeError(f"Timed out after {limit_s:g} s of waiting for {self._collective.call}.")
        if self._event_has_ended is not None:
            self._event_has_ended.wait(GRACE_S)
        if self._future is not None:  # it has its value before its callbacks run
            with suppress(RuntimeError):
                torch.futures.Future.wait(self._future)
        self.has_been_waited_for = True
        if self._collective.error is not None:
            raise RuntimeError(self._collective.error)
        return True

    def is_completed(self) -> bool:
        return self._collective.is_done

    def is_success(self) -> bool:
        return self._collective.is_done and self._collective.error is None

    def exception(self) -> Exception | None:
        return None if self._collective.error is None else RuntimeError(self._collective.error)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def call_when_done(self, call: Callable[[], object]) -> None:
        """In the thread that completes it; without any effect on when that is, unlike `get_future`."""
        self._host.call_when_done(self._collective, lambda _: call(), is_urgent=False)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result. C++ code may wait for it, so the progress thread advances the collective."""
        if self._future is None:
            future = SharedFuture(self.wait)
            self._future = future
            self._host.call_when_done(self._collective, lambda c: _complete(future, c, self._result))
        return self._future


class SeveralWorks(dist.Work):
    """Collectives that were called together."""

    def __init__(self, works: Sequence[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        all_done = torch.futures.collect_all([work.get_future() for work in self._works])
        return all_done.then(lambda done: ([future.value() for future in done.value()], self.result())[1])


class SharedFuture(torch.futures.Future[Any]):
    """The future of a collective. A thread that waits for it in Python advances the collective."""

    def __new__(cls, _: object) -> SharedFuture:
        return super().__new__(cls)

    def __init__(self, wait: Callable[[], object]):
        super().__init__()
        self._advance = wait

    def wait(self) -> Any:
        self._advance()
        return super().wait()


class CollectiveFailed(RuntimeError):
    """The error of a future. C++ sees a value: torch's DDP pickles it to find tensors, which raises the error."""

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise self


def _complete(future: torch.futures.Future[Any], collective: Collective, result: list[torch.Tensor]) -> None:
    if collective.error is None:
        future.set_result(result)
    else:
        future.set_exception(CollectiveFailed(collective.error))  # type: ignore[arg-type]  # torch's stub


def _record_event(
    host: HostCommunicator, collective: Collective, inputs: Sequence[torch.Tensor]
) -> threading.Event:
    """Record it in the profile, named as gloo's, until it is done. Returns an event that is set after that.

    It ends in a thread of its own, so that the profiler marks it as asynchronous. A waiting thread must also wait
    for its end: a recorded event that outlives the profiler writes to freed memory.
    """
    has_ended = threading.Event()
    name = f"gloo:{collective.call.kind.name.lower()}"
    record: Any = torch.autograd._record_function_with_args_enter(name, *inputs)  # type: ignore[attr-defined]

    def end() -> None:
        torch.autograd._record_function_with_args_exit(record)  # type: ignore[attr-defined]
        has_ended.set()

    host.call_when_done(collective, lambda _: threading.Thread(target=end).start(), is_urgent=False)
    return has_ended


def _by_gloo(name: str) -> Any:
    """Torch's own method would pass the call on by its dispatcher, in which an all-to-all has hung."""

    def call(self: SharedMemoryGroup, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self._gloo, name)(*args, **kwargs)
        return work if name in NOT_BEFORE_A_BARRIER else self._keep(work)

    return call


@_not_compiled
class SharedMemoryGroup(_Base):
    """A process group over shared memory, and over gloo for what is not done there."""

    def __init__(self, gloo: Any, host: HostCommunicator | None, num_lanes: int = 0):
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo
        self._host = host
        self._num_lanes = num_lanes
        # Torch's `join` hands a work to C++ and drops its Python object, without which it would never be done.
        self._small_works: list[SharedWork] = []
        self._lock = threading.RLock()
        self._gloo_works: weakref.WeakSet[dist.Work] = weakref.WeakSet()  # a barrier waits for those in flight
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # which torch 2.15 asks for its name
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:
        return NAME

    @property
    def shares_memory(self) -> bool:
        return self._host is not None and self._host.end.alive

    @property
    def progress_delay_s(self) -> float:
        """How long a collective rests while no rank waits for it."""
        return 0.0 if self._host is None else self._host.progress_delay_s

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with undefined contents, which is reduced where it lies. Not collective."""
        if self._host is None or not self._host.end.alive or numel == 0:
            return torch.empty(numel, dtype=dtype, device=CPU)
        return self._host.allocate(numel, dtype)

    def shutdown(self) -> None:
        """Disconnect. Collectives in flight fail; later ones use gloo."""
        if self._host is not None:
            self._host.end()

    abort = shutdown

    # ------------------------------------------------------------------ in shared memory

    def allreduce(self, tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        tensors, opts = _listed(tensors), _options(c10d.AllreduceOptions, opts, timeout)
        if len(tensors) != 1 or opts.reduceOp != dist.ReduceOp.SUM or not self._shares(tensors[0]):
            return self._keep(self._gloo.allreduce(tensors, opts))
        tensor = tensors[0]
        flat, layout = _in_memory_order(tensor)
        call = Call(Kind.ALL_REDUCE, tensor.dtype, tensor.numel(), layout)
        outputs = [(flat, tensor)]
        if self._num_lanes:
            return self._launch(all_reduce_across, call, opts, tensors, outputs, flat, flat, self._num_lanes)
        is_small = tensor.nbytes <= SMALL_BYTES
        steps = collectives.all_reduce_small if is_small else collectives.all_reduce
        return self._launch(steps, call, opts, tensors, outputs, flat, flat, in_place=not is_small)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: datetime.timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        if isinstance(opts, int):
            opts, root = None, opts
        tensors, opts = _listed(tensors), _options(c10d.BroadcastOptions, opts, timeout or None)  # 0 is no limit
        if root is not None:
            opts.rootRank = root
        has_root = 0 <= opts.rootRank < self.size() and opts.rootTensor == 0
        if len(tensors) != 1 or not has_root or not self._shares_all(tensors[0]):
            return self._keep(self._gloo.broadcast(tensors, opts))
        tensor, source = tensors[0], opts.rootRank
        flat, call = _flat(tensor), Call(Kind.BROADCAST, tensor.dtype, tensor.numel(), source)
        # The source's tensor is not written: the copy of a tensor to itself is left out
        contribution, output = (flat, (tensor, tensor)) if self.rank() == source else (None, (flat, tensor))
        return self._launch(collectives.broadcast, call, opts, tensors, [output], contribution, flat, source)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: datetime.timedelta | None = None
    ) -> dist.Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        fits = len(inputs) == len(outputs) == 1 and len(outputs[0]) == self.size()
        if not fits or not self._fit(inputs[0], outputs[0]):
            return self._keep(self._gloo.allgather(outputs, inputs, opts))
        flat = [(_flat(output), output) for output in outputs[0]]
        return self._gather(flat, [part for part, _ in flat], inputs[0], opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = _options(c10d.AllgatherOptions, opts)
        fits = self._shares_all(output) and output.numel() == input.numel() * self.size()
        if not fits or not self._fit(input, [input]) or output.dtype != input.dtype:
            return self._keep(self._gloo._allgather_base(output, input, opts))
        flat = _flat(output)
        return self._gather([(flat, output)], flat.chunk(self.size()), input, opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return SeveralWorks([self._allgather_base(*each, opts) for each in zip(outputs, inputs, strict=True)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = _options(c10d.ReduceScatterOptions, opts)
        fits = self._shares_all(output) and self._shares(input) and input.numel() == output.numel() * self.size()
        if not fits or output.dtype != input.dtype or opts.reduceOp != dist.ReduceOp.SUM:
            return self._keep(self._gloo._reduce_scatter_base(output, input, opts))
        if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
            input = input.clone()  # it is read while the output is written
        call = Call(Kind.REDUCE_SCATTER, input.dtype, input.numel())
        flat, part = _flat(input), _flat(output)
        return self._launch(collectives.reduce_scatter, call, opts, [input], [(part, output)], flat, flat, part)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return SeveralWorks([self._reduce_scatter_base(*each, opts) for each in zip(outputs, inputs, strict=True)])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        """As gloo's: first all that this rank has called before is done. For gloo's own works it blocks."""
        opts = _options(c10d.BarrierOptions, opts, timeout)
        if self._host is not None and self._num_lanes:
            self._host.wait_for_all()
        if not self.shares_memory or self._num_lanes:
            return self._gloo.barrier(opts)
        with self._lock:
            works = list(self._gloo_works)
        for work in works:
            if not work.is_completed():
                work.wait()
        return self._launch(collectives.barrier, Call(Kind.BARRIER, torch.uint8, 0), opts, [], [], None)

    # ------------------------------------------------------------------ by gloo

    allgather_coalesced = _by_gloo("allgather_coalesced")
    allreduce_coalesced = _by_gloo("allreduce_coalesced")
    all_to_all_single = alltoall_base = _by_gloo("alltoall_base")
    alltoall = _by_gloo("alltoall")
    gather = _by_gloo("gather")
    scatter = _by_gloo("scatter")
    reduce = _by_gloo("reduce")
    reduce_scatter = _by_gloo("reduce_scatter")
    send = _by_gloo("send")
    recv = _by_gloo("recv")
    recv_anysource = _by_gloo("recv_anysource")
    monitored_barrier = _by_gloo("monitored_barrier")

    # ------------------------------------------------------------------ helpers

    def _launch(
        self,
        steps: Any,
        call: Call,
        opts: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Outputs,
        contribution: torch.Tensor | None,
        *arguments: Any,
        in_place: bool = True,
    ) -> dist.Work:
        host = self._host
        assert host is not None, "the tensors are shared"
        limit_s = opts.timeout.total_seconds()
        collective = host.launch(
            _then_copy(steps, [(flat, tensor) for flat, tensor in outputs if not _is_view(flat, tensor)]),
            call,
            contribution,
            *arguments,
            limit_s=limit_s if limit_s > 0 else time_limit_s(self._gloo),
            in_place=in_place,
            is_waited_for=not opts.asyncOp,
            is_inference=any(tensor.is_inference() for pair in outputs for tensor in pair),
        )
        work = SharedWork(host, collective, [tensor for _, tensor in outputs], inputs)
        if opts.asyncOp and call.numel <= 16:
            kept = [other for other in self._small_works if not other.has_been_waited_for]
            self._small_works = [*kept[-MAX_SMALL_WORKS:], work]
        return work

    def _gather(
        self, outputs: Outputs, parts: Sequence[torch.Tensor], tensor: torch.Tensor, opts: Any
    ) -> dist.Work:
        call, flat = Call(Kind.ALL_GATHER, tensor.dtype, tensor.numel()), _flat(tensor)
        others = [part for rank, part in enumerate(parts) if rank != self.rank()]
        in_place = not any(_overlap(flat, part) for part in others)
        return self._launch(
            collectives.all_gather, call, opts, [tensor], outputs, flat, flat, parts, in_place=in_place
        )

    def _keep(self, work: dist.Work) -> dist.Work:
        """Gloo's, for the next barrier."""
        with self._lock:
            self._gloo_works.add(work)
        return work

    def _shares(self, tensor: torch.Tensor) -> bool:
        """Equal on every rank, since it depends only on properties that any collective requires to be equal."""
        return (
            self.shares_memory
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.dtype in DTYPES
            and tensor.numel() > 0
        )

    def _shares_all(self, tensor: torch.Tensor) -> bool:
        """The same for collectives that are done on one host only."""
        return not self._num_lanes and self._shares(tensor)

    def _fit(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
        return self._shares_all(tensor) and all(
            self._shares(part) and part.numel() == tensor.numel() and part.dtype == tensor.dtype for part in parts
        )


def connect_group(
    store: dist.Store | None,
    gloo: c10d.ProcessGroupGloo,
    *,
    across_hosts: bool,
) -> SharedMemoryGroup:
    """The ranks of `gloo`, connected by shared memory. Collective.

    Args:
        across_hosts: ranks on several hosts add within each host, then between them.

    Raises:
        CannotConnect: on every rank, with the same reason.
    """
    rank, size = gloo.rank(), gloo.size()
    if size == 1:
        raise CannotConnect("there is only one rank")
    gather = rendezvous.gather_through(gloo)
    names = rendezvous.gather_hosts(gather, rendezvous.name_of_host())
    hosts = sorted(wording.by_value(dict(enumerate(names))).values())  # the ranks of each; both in ascending order
    if len(hosts) == 1:
        host = rendezvous.connect_ranks(gather, rank, range(size))
        return SharedMemoryGroup(gloo, host)
    if not across_hosts:
        other = next(rank for rank, name in enumerate(names) if name != names[0])
        raise CannotConnect(f"rank {other} is on another host than rank 0, or in a container with its own network")
    if len(hosts) == size:
        raise CannotConnect("every rank is on a host of its own")
    token, *_ = gather(secrets.token_hex(8))  # for keys in the store that are not used yet
    beside = next(ranks for ranks in hosts if rank in ranks)
    local_rank, num_lanes = beside.index(rank), min(map(len, hosts))

    def make_lane() -> Lane | None:
        if local_rank >= num_lanes:
            return None
        if store is None:
            raise RuntimeError("the group has no store through which hosts could connect")
        lane_store = dist.PrefixStore(f"minddp/lane/{token}/{local_rank}", store)
        of_lane = [ranks[local_rank] for ranks in hosts]
        return Lane(lane_store, of_lane, rank, rendezvous.CONNECT_LIMIT_S, time_limit_s(gloo))

    host = rendezvous.connect_ranks(gather, rank, beside, make_lane)
    return SharedMemoryGroup(gloo, host, num_lanes)


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _options(kind: Any, opts: Any, timeout: datetime.timedelta | None = None) -> Any:
    """The options of a collective: those given, or defaults with a reduce operation and a time limit."""
    if opts is not None and not isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    made = kind()
    if opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A copy if it is not contiguous."""
    return tensor.detach().contiguous().view(-1)


def _in_memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """All elements in the order in which gloo adds them, and a checksum of the strides: 0 if contiguous."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return _flat(tensor), 0
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.detach().as_strided((tensor.numel(),), (1,)), 1 + zlib.crc32(str(strides).encode())


def _is_view(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    return flat.data_ptr() == tensor.data_ptr()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two contiguous tensors."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _then_copy(steps: Any, outputs: Outputs) -> Any:
    """The collective `steps`, and then each output's flat copy written to it."""
    if not outputs:
        return steps

    def steps_and_copies(*arguments: Any) -> Any:
        yield from steps(*arguments)
        for flat, tensor in outputs:
            tensor.detach().copy_(flat.view(tensor.shape))

    return steps_and_copies
