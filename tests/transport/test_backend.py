"""The backend "minddp" of torch.distributed beside gloo: equal results in every collective, alone and in a row."""

from __future__ import annotations

import datetime
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.transport import backend
from minddp.transport.backend import SharedMemoryGroup
from minddp.transport.shared_memory import control_block
from minddp.transport.shared_memory.collectives import SMALL_BYTES
from minddp.transport.shared_memory.control_block import DTYPES
from tests.ranks import RankFailure, on_ranks
from tests.transport.places import footprint, mortal_ranks, pretended_host, random_values

on_two_to_four = on_ranks(lambda world_size, **_: world_size)
two_to_four = pytest.mark.parametrize("world_size", [2, 3, 4])


@contextmanager
def group_of(ranks: list[int] | None = None, **options: Any) -> Iterator[Any]:
    backend.register()
    group = dist.new_group(ranks, backend="minddp", **options)
    assert isinstance(group, SharedMemoryGroup)
    yield group
    dist.destroy_process_group(group)


# ---------------------------------------------------------------------- the same results as gloo

Collective = Callable[[Any, torch.Tensor], torch.Tensor | list[torch.Tensor]]


def all_gather(group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(outputs, tensor, group)
    return outputs


def all_gather_into_a_tensor(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(group.size() * tensor.numel())
    group._allgather_base(output, tensor).wait()
    return output


def gather_in_place(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_zeros(group.size() * tensor.numel())
    ours = output.chunk(group.size())[group.rank()]
    ours.copy_(tensor)
    group._allgather_base(output, ours).wait()
    return output


def gather_from_anothers_slot(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The input lies in the output, where the contribution of another rank is going to be written."""
    numel = group.size() * tensor.numel()
    is_ours = type(group) is SharedMemoryGroup
    output = group.allocate(numel, tensor.dtype) if is_ours else tensor.new_empty(numel)
    ours = output.chunk(group.size())[(group.rank() + 1) % group.size()].copy_(tensor) if is_ours else tensor
    group._allgather_base(output, ours).wait()
    return output


def reduce_scatter(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(tensor.numel())
    group._reduce_scatter_base(output, torch.cat([tensor * (1 + r) for r in range(group.size())])).wait()
    return output


def reduce_scatter_in_place(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.cat([tensor * (1 + r) for r in range(group.size())])
    output = (
        whole.chunk(group.size())[group.rank()] if type(group) is SharedMemoryGroup else torch.empty_like(tensor)
    )
    group._reduce_scatter_base(output, whole).wait()
    return output


def all_reduce(op: Any) -> Collective:
    def reduce_all(group: Any, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, op, group)
        return tensor

    return reduce_all


def broadcast(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, group.size() - 1, group)
    return tensor


def all_to_all(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    sent = tensor.repeat(group.size())
    output = torch.empty_like(sent)
    dist.all_to_all_single(output, sent, group=group)
    return output


def gather_and_scatter(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    at_root = group.rank() == 0
    gathered = [torch.empty_like(tensor) for _ in range(group.size())] if at_root else None
    dist.gather(tensor, gathered, 0, group)
    dist.scatter(tensor, gathered and gathered[::-1], 0, group)
    return tensor


def reduce_to_first(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    dist.reduce(tensor, 0, group=group)
    return tensor if group.rank() == 0 else torch.empty(0)


def send_round(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    received, rank, size = torch.empty_like(tensor), group.rank(), group.size()
    ops = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


COLLECTIVES: dict[str, Collective] = {
    **{f"all_reduce {op.name}": all_reduce(op) for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT)},
    **{
        each.__name__: each
        for each in (
            all_gather,
            all_gather_into_a_tensor,
            gather_in_place,
            gather_from_anothers_slot,
            reduce_scatter,
            reduce_scatter_in_place,
            broadcast,
            all_to_all,
            gather_and_scatter,
            reduce_to_first,
            send_round,
        )
    },
}
SIZES = (1, 7, 1000, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 300_001)


@on_two_to_four
@two_to_four
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_has_gloos_bits(rank: int, world_size: int, name: str) -> None:
    gloo, collective = dist.group.WORLD, COLLECTIVES[name]
    with group_of() as group:
        for dtype in DTYPES:
            for numel in SIZES:
                values = random_values(rank, numel, dtype, seed=numel)
                theirs, ours = (collective(each, values.clone()) for each in (gloo, group))
                for one, other in zip(*(r if isinstance(r, list) else [r] for r in (theirs, ours)), strict=True):
                    assert torch.equal(one, other), (dtype, numel)


@on_two_to_four
@two_to_four
def test_tensors_that_are_not_contiguous(rank: int, world_size: int) -> None:
    """Dense ones are added in the order of memory, with gloo's bits. Others give the same as their copies."""
    with group_of() as group:
        for dims in ((0, 2, 1), (2, 0, 1), (1, 0, 2)):
            theirs = random_values(rank, 30_000, torch.float32, 1).view(10, 30, 100).permute(dims)
            ours = theirs.clone(memory_format=torch.preserve_format)
            assert ours.stride() == theirs.stride()
            dist.all_reduce(theirs)
            dist.all_reduce(ours, group=group)
            assert torch.equal(ours, theirs)

        def strided(tensor: torch.Tensor, number: int) -> torch.Tensor:
            """The same values, contiguous on some ranks only."""
            match (number + rank) % 3:
                case 0:
                    return tensor
                case 1:
                    return tensor.repeat_interleave(2, dim=1)[:, ::2]
                case _:
                    return tensor.t().contiguous().t() if number < 3 else tensor.repeat_interleave(3, dim=1)[:, ::3]

        for number in range(6):
            for numel in (20, 20_000):
                value = random_values(rank, numel * world_size, torch.float32, number).view(-1, 2)
                part = value[: numel // 2]
                parts = [torch.empty_like(part) for _ in range(world_size)]
                dist.all_gather(parts, part)
                found = [strided(torch.zeros_like(part), number + i) for i in range(world_size)]
                dist.all_gather(found, strided(part, number), group=group)
                assert all(map(torch.equal, parts, found))
                output = strided(torch.zeros(len(value), 2), number)
                dist.all_gather_into_tensor(output, strided(part, number), group)
                assert torch.equal(output, torch.cat(parts))
                scattered, output = torch.empty_like(part), strided(torch.zeros_like(part), number)
                dist.reduce_scatter_tensor(scattered, value.clone())
                dist.reduce_scatter_tensor(output, strided(value, number), group=group)
                assert torch.equal(output, scattered)
                output = strided(part.clone(), number)
                dist.broadcast(output, 1, group)
                assert torch.equal(output, parts[1])
                dist.all_reduce(part)
                gaps = part.new_zeros(len(part), 5)[:, 1:3] if rank else part.clone()
                gaps.copy_(parts[rank])
                dist.all_reduce(gaps, group=group)
                assert torch.equal(gaps, part)


@on_two_to_four
@two_to_four
def test_many_in_flight_have_gloos_bits(rank: int, world_size: int) -> None:
    """Random collectives, waited for in another order on each rank, some by nobody until the end."""
    same, ours = random.Random(world_size), random.Random(rank)
    with group_of() as group:
        for _ in range(6):
            under_way = []
            for _ in range(same.choice([3, 40, 300])):
                name = same.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"])
                numel, dtype = same.choice(SIZES[:5]), same.choice(DTYPES)
                source = same.randrange(world_size)
                values = random_values(rank, numel, dtype, seed=same.randrange(100))
                results = [(values.clone(), values.new_empty(world_size * numel)) for _ in range(2)]
                works = [
                    launch(each, name, *tensors, source)
                    for each, tensors in zip((dist.group.WORLD, group), results, strict=True)
                ]
                under_way.append((name, works, results))
            ours.shuffle(under_way)
            for _, works, _ in under_way:
                for work in works:
                    work.wait()
            for name, _, [theirs, found] in under_way:
                index = int(name in ("all_gather", "reduce_scatter"))
                size = theirs[0].numel() if name == "reduce_scatter" else None
                assert torch.equal(theirs[index][:size], found[index][:size]), name


def launch(group: Any, name: str, values: torch.Tensor, longer: torch.Tensor, source: int) -> Any:
    match name:
        case "all_reduce":
            return dist.all_reduce(values, group=group, async_op=True)
        case "reduce_scatter":
            whole = values.repeat(group.size())
            return group._reduce_scatter_base(longer[: values.numel()], whole)
        case "all_gather":
            return group._allgather_base(longer, values)
        case "broadcast":
            return dist.broadcast(values, source, group=group, async_op=True)
        case _:
            return dist.barrier(group=group, async_op=True)


@on_ranks(2)
def test_objects_and_functional_collectives(rank: int) -> None:
    import torch.distributed._functional_collectives as functional

    with group_of() as group:
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank}, group)
        assert objects == [{"rank": 0}, {"rank": 1}]
        listed = [rank]
        dist.broadcast_object_list(listed, 1, group)
        assert listed == [1]
        x = torch.arange(4.0) + rank
        assert functional.all_reduce(x, "sum", group).tolist() == [1, 3, 5, 7]
        assert functional.all_gather_tensor(x[:1], 0, group).tolist() == [0, 1]
        assert functional.reduce_scatter_tensor(x, "sum", 0, group).tolist() == [[1, 3], [5, 7]][rank]
        assert functional.broadcast(x, 1, group).tolist() == [1, 2, 3, 4]


# ---------------------------------------------------------------------- what trains on it


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))


def trained(ddp: Any, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ddp(random_values(rank, 320, torch.float32, step).view(8, 40)).square().mean().backward()
        optimizer.step()
    return [param.full_tensor() if hasattr(param, "full_tensor") else param.detach() for param in ddp.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_torchs_ddp_trains_to_the_same_bits(rank: int, options: dict[str, Any]) -> None:
    with group_of() as group:
        ours, theirs = (
            trained(TorchDDP(model(), process_group=each, bucket_cap_mb=0.1, **options), rank)
            for each in (group, None)
        )
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.slow
@on_ranks(2)
def test_torchs_ddp_is_compiled_with_a_static_graph(rank: int) -> None:
    with group_of() as group:
        ours, theirs = (
            trained(
                torch.compile(TorchDDP(model(), process_group=each, static_graph=True), backend="aot_eager"), rank
            )
            for each in (group, None)
        )
        assert all(map(torch.equal, ours, theirs))


@on_ranks(2)
def test_a_hook_that_waits_in_a_callback(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    with group_of() as group:
        results = []
        for each in (group, dist.group.WORLD):
            ddp = TorchDDP(model(), process_group=each)
            state = PowerSGDState(each, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook)
            results.append(trained(ddp, rank))
        assert all(map(torch.equal, *results))


@on_ranks(3)
def test_fully_sharded_modules_train_to_the_same_bits(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    with group_of() as group:
        results = []
        for each in (group, dist.group.WORLD):
            module = model()
            mesh = DeviceMesh.from_group(each, "cpu")
            for layer in module:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            results.append(trained(fully_shard(module, mesh=mesh), rank))
        assert all(map(torch.equal, *results))


# ---------------------------------------------------------------------- waiting, and what goes wrong


@on_ranks(2)
def test_a_collective_is_done_though_nobody_waits(rank: int) -> None:
    with group_of() as group:
        for numel in (10, 1_000_000):
            tensor = torch.ones(numel)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            deadline = time.monotonic() + 30
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert tensor.eq(2).all()


@on_ranks(2)
def test_an_idle_group_uses_no_core(rank: int) -> None:
    with group_of() as group:
        dist.all_reduce(torch.ones(10), group=group)
        dist.barrier()
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.3


@on_ranks(2)
def test_a_future_that_is_waited_for_in_a_callback_of_another(rank: int) -> None:
    with group_of() as group:
        futures = [dist.all_reduce(torch.ones(10), group=group, async_op=True).get_future() for _ in range(2)]
        seen: list[float] = []

        def wait_for_another(first: torch.futures.Future) -> torch.Tensor:
            later = dist.all_reduce(first.value()[0], group=group, async_op=True).get_future()
            seen.append(later.then(lambda future: future.value()[0].sum()).wait().item())
            return first.value()

        for future in [future.then(wait_for_another) for future in futures]:
            future.wait()
        assert seen == [40, 40]


@on_ranks(2)
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (lambda group: dist.all_reduce(torch.ones(4), group=group), "all_reduce of 4 elements of torch.float32"),
        (lambda group: dist.all_reduce(torch.ones(3).half(), group=group), "3 elements of torch.float16"),
        (lambda group: dist.barrier(group=group), "barrier"),
        (lambda group: dist.broadcast(torch.ones(3), 1, group=group), "broadcast of 3 .* from rank 1"),
    ],
    ids=["size", "dtype", "collective", "broadcast"],
)
def test_different_calls_are_an_error_that_names_both(rank: int, theirs: Callable[[Any], None], words: str) -> None:
    with group_of() as group:
        call = theirs if rank == 1 else lambda each: dist.all_reduce(torch.ones(3), group=each)
        with pytest.raises(RuntimeError, match=rf"rank 0 calls all_reduce of 3 .*, but rank 1 calls .*{words}"):
            call(group)
            dist.barrier(group=group)  # the source of a broadcast does not wait for the others


@on_ranks(2)
def test_strides_that_differ_between_ranks_are_an_error(rank: int) -> None:
    """Gloo adds elements at the same place in memory, which are others."""
    with group_of() as group:
        flat = torch.ones(6)
        dist.all_reduce(flat.as_strided((1, 3, 2), (6, 1, 3) if rank else (1, 1, 3)), group=group)
        assert flat.tolist() == [2] * 6
        tensor = torch.ones(3, 2) if rank == 0 else torch.ones(2, 3).t()
        with pytest.raises(
            RuntimeError, match=r"6 elements of torch.float32, but rank 1 .* that are not contiguous"
        ):
            dist.all_reduce(tensor, group=group)


@contextmanager
def late_looks(rank: int) -> Iterator[None]:
    """A counter is often raised just after this rank has looked at it, as if another process had the core."""
    all_reach, draw = control_block.Counter.all_reach, random.Random(rank)

    def look(self: control_block.Counter, number: int) -> bool:
        has_reached = all_reach(self, number)
        if not has_reached and draw.random() < 0.5:
            time.sleep(draw.random() * 0.003)
        return has_reached

    with mock.patch.object(control_block.Counter, "all_reach", look):
        yield


@on_ranks(4)
def test_hosts_add_chunks_of_one_collective(rank: int) -> None:
    """Though a collective is seen to have begun only after a later one of the same size."""
    with pretended_host("aabb"[rank]), group_of() as group, late_looks(rank) if rank < 2 else nullcontext():
        for _ in range(40):
            tensors = [torch.full((1000,), 10.0**i) for i in range(4)]
            for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
                work.wait()
            assert all(tensor.eq(4 * 10.0**i).all() for i, tensor in enumerate(tensors))


@on_ranks(2)
def test_a_barrier_comes_after_all_earlier_collectives(rank: int) -> None:
    with group_of() as group, late_looks(rank):
        for _ in range(30):
            ones, ranks = torch.ones(100_000), torch.full((1_000_000,), float(rank))
            works = [dist.all_reduce(ones, group=group, async_op=True)]
            dist.barrier(group=group)
            assert ones.eq(2).all()
            works.append(dist.all_reduce(ranks, ReduceOp.MAX, group=group, async_op=True))  # by gloo
            dist.barrier(group=group)
            assert ranks.eq(1).all()


@on_ranks(2)
def test_a_future_has_its_value_after_a_wait(rank: int) -> None:
    """Also one that the callback of another waits for, when both are done at once."""
    with group_of() as group:
        for _ in range(60):
            works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(2)]
            first, second = (work.get_future() for work in works)
            chained = first.then(lambda _, other=second: other.wait()[0].sum().item())
            works[1].wait()
            assert second.value()[0].sum() == 20
            assert chained.wait() == 20


@on_ranks(2)
def test_a_future_that_another_thread_is_completing(rank: int) -> None:
    complete = backend._complete

    def complete_slowly(*arguments: Any) -> None:
        time.sleep(0.3)
        complete(*arguments)

    with group_of() as group, mock.patch.object(backend, "_complete", complete_slowly):
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        future = work.get_future()
        time.sleep(0.1)
        work.wait()
        assert future.done()


@on_ranks(2)
def test_several_tensors_at_once(rank: int) -> None:
    def coalesced(group: Any) -> list[torch.Tensor]:
        found = []
        for numels in ([3], [2, 1000, 7]):
            inputs = [random_values(rank, 2 * numel, torch.float32, numel) for numel in numels]
            gathered, scattered = [torch.empty(4 * n) for n in numels], [torch.empty(n) for n in numels]
            with dist._coalescing_manager(group):
                for output, each in zip(gathered, inputs, strict=True):
                    dist.all_gather_into_tensor(output, each, group)
            with dist._coalescing_manager(group, async_ops=True) as works:
                for output, each in zip(scattered, inputs, strict=True):
                    dist.reduce_scatter_tensor(output, each, group=group)
            works.wait()
            found += [*gathered, *scattered]
        return found

    with group_of() as group:
        theirs, ours = coalesced(dist.group.WORLD), coalesced(group)
        assert len(ours) == 8
        assert all(map(torch.equal, theirs, ours))
        outputs = [[torch.empty(2), torch.empty(3)] for _ in range(2)]
        dist.all_gather_coalesced(outputs, [torch.ones(2), torch.ones(3)], group)
        assert outputs[1][1].tolist() == [1, 1, 1]
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather([torch.empty(2)] * 3, torch.ones(2), group)
        dist.barrier(group=group)


@on_ranks(2)
def test_a_copy_in_inference_mode_is_written_by_any_thread(rank: int) -> None:
    with group_of() as group:
        with torch.inference_mode():
            tensor = torch.ones(10, 4)[:, :2]
        normal = torch.ones(10, 4)[:, :2]
        with torch.inference_mode():
            works = [dist.all_reduce(each, group=group, async_op=True) for each in (tensor, normal)]
            time.sleep(0.1)  # the progress thread is faster
            for work in works:
                work.wait()
        assert tensor.eq(2).all()
        assert normal.eq(2).all()


@on_ranks(2)
def test_a_new_time_limit(rank: int) -> None:
    with group_of() as group:
        dist.all_reduce(torch.ones(3), group=group)
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), group)
        if rank != 1:
            with pytest.raises(
                RuntimeError, match=r"Rank 1 has not begun all_reduce 1 within the timeout of 0\.5 s"
            ):
                dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()


@on_ranks(2)
def test_a_signal_handler_in_the_middle_of_a_wait(rank: int) -> None:
    """Its collective could only be done after the one that it interrupts."""

    def handle(*_: object) -> None:
        dist.barrier(group=group)

    with group_of() as group:
        tensor = torch.ones(3)
        if rank == 0:
            before = signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            with pytest.raises(RuntimeError, match="A signal handler uses a process group"):
                work.wait()
            signal.signal(signal.SIGALRM, before)
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2, 2, 2]


def die_at_random(rank: int, seed: int) -> str | None:
    """Rank 1 is killed by a thread while collectives run. The others say what they saw, and how late."""
    draw = random.Random(seed)
    with group_of() as group:
        if rank == 1:
            after_s = random.Random(-seed).uniform(0, 0.05)
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                dist.all_reduce(torch.ones(draw.choice([10, 100_000])), group=group)
                group._allgather_base(torch.empty(3000), torch.ones(1000)).wait()
        except RuntimeError as error:
            raise RuntimeError(f"{error}") from None


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_all_others() -> None:
    before = set(os.listdir("/dev/shm"))
    with mortal_ranks(grace_s=20.0) as pool:
        for seed in range(50):
            started = time.monotonic()
            with pytest.raises(RankFailure) as failure:
                pool.run(die_at_random, seed)
            assert time.monotonic() - started < 15
            assert "exit code -9" in failure.value.reports[1]
            for rank in (0, 2):
                assert "Rank 1 has ended" in failure.value.reports[rank]
    assert {name for name in set(os.listdir("/dev/shm")) - before if "minddp" in name} == set()


def die_in_backward(rank: int) -> None:
    """Rank 1 is killed in the third backward of torch's DDP, whose C++ code waits for futures."""
    with group_of() as group:
        ddp = TorchDDP(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), process_group=group)
        for step in range(4):
            output = ddp(torch.ones(1, 5)).sum()
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            output.backward()


def test_the_error_of_a_future_is_one_for_torchs_ddp() -> None:
    with mortal_ranks(grace_s=20.0) as pool, pytest.raises(RankFailure) as failure:
        pool.run(die_in_backward)
    assert "exit code -9" in failure.value.reports[1]
    assert (
        "RuntimeError: Cannot extract tensors from value: CollectiveFailed: Rank 1 has ended"
        in (failure.value.reports[0])
    )


@pytest.mark.slow
@on_ranks(2)
def test_many_groups_leave_nothing(rank: int) -> None:
    footprints = []
    for number in range(60):
        with group_of() as group:
            dist.all_reduce(torch.ones(100_000), group=group)
            work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
            work.get_future().wait()
        del group, work
        gc.collect()
        if number in (5, 59):
            dist.barrier()
            footprints.append(footprint())
    early, late = footprints
    assert all(now <= before for before, now in zip(early, late, strict=True)), footprints


@on_ranks(2)
def test_a_backend_for_another_device_is_not_dropped(rank: int) -> None:
    backend.register()
    with pytest.raises(
        ValueError, match=r"cannot combine it with nccl for cuda. Pass backend=.minddp. to a new_group"
    ):
        dist.new_group(backend="cpu:minddp,cuda:nccl")


@on_ranks(4)
def test_groups_of_some_ranks(rank: int) -> None:
    backend.register()
    groups = [dist.new_group(ranks, backend="minddp") for ranks in ([0, 2], [3, 1])]
    tensor = torch.tensor([10.0**rank])
    dist.all_reduce(tensor, group=groups[rank % 2])
    assert tensor.item() == [101, 1010][rank % 2]
    for group in groups:
        if isinstance(group, SharedMemoryGroup):
            dist.destroy_process_group(group)


@on_ranks(2)
def test_torchs_join_with_uneven_inputs(rank: int) -> None:
    """It hands a work to C++ and drops the Python object, without which nobody would complete it."""
    with group_of() as group:
        ddp = TorchDDP(nn.Linear(5, 5, bias=False), process_group=group)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(2 + rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 5)).sum().backward()
                assert torch.equal(ddp.module.weight.grad, torch.ones(5, 5))


@on_ranks(4)
def test_a_barrier_between_hosts_comes_after_all_earlier_sums(rank: int) -> None:
    with pretended_host("aabb"[rank]), group_of() as group:
        for _ in range(5):
            ones = torch.ones(1_000_000)
            work = dist.all_reduce(ones, group=group, async_op=True)
            dist.barrier(group=group)
            assert work.is_completed()
            assert ones.eq(4).all()


@on_ranks(2)
def test_a_future_of_several_works_has_their_error(rank: int) -> None:
    with group_of(timeout=datetime.timedelta(seconds=0.5)) as group:
        if rank == 0:
            outputs, inputs = [torch.zeros(4), torch.zeros(6)], [torch.ones(2), torch.ones(3)]
            work = group.allgather_into_tensor_coalesced(outputs, inputs)
            with pytest.raises(RuntimeError, match="Rank 1 has not begun"):
                work.get_future().wait()
        dist.barrier()
