"""Each example trains to the bits of torch's class, or the test says what differs. They use public names only."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import examples
import minddp
from examples.bucket_per_block import one_bucket_per_block
from examples.bytes_by_bucket import BytesByBucket
from examples.ranks_as_threads import on_threads, wrapped
from examples.top_k_hook import TopK, top_k
from examples.uneven_batches import UnevenBatches
from minddp.core.plan import plan_from_groups
from minddp.tools.watchdog import comparison
from minddp.transport import Transport
from tests.ranks import RankPool, on_ranks

STEPS = 4
CAP_MB = 0.001  # several buckets
State = dict[str, torch.Tensor]


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(
        nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU()), nn.Linear(40, 40), nn.Linear(40, 3)
    )
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return module


def train(rank: int, ddp: nn.Module, batch_size: int = 5) -> State:
    """Each rank's data is its own; returns the trained state."""
    generator = torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(batch_size, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in ddp.state_dict().items()}


def torch_trained(rank: int, prepare: Callable[[nn.Module], object] = lambda _: None) -> State:
    ddp = TorchDDP(network(), bucket_cap_mb=CAP_MB)
    prepare(ddp)
    return train(rank, ddp)


def differing(one: State, other: State) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value.view(-1), other[name].view(-1))]


Ranks = Callable[[int], RankPool]
FILES = sorted(Path(examples.__file__).parent.glob("*.py"))


def wrap(**options: object) -> minddp.DistributedDataParallel:
    return minddp.DistributedDataParallel(network(), bucket_cap_mb=CAP_MB, **options)


# ------------------------------------------------------------------ an observer


@on_ranks(2)
def test_an_observer_counts_the_bytes_of_each_bucket(rank: int) -> None:
    ddp, shown = wrap(), []
    with BytesByBucket(ddp, shown.append) as counter:
        state = train(rank, ddp)
    sent = [counter.sent[bucket] for bucket in range(len(ddp.plan.buckets))]
    train(rank, ddp)
    after = sum(counter.sent.values()) - sum(sent)
    assert len(shown) == STEPS
    assert differing(state, torch_trained(rank)) == []
    assert len(sent) > 1
    assert sent == [bucket.nbytes * (STEPS - 1) for bucket in ddp.plan.buckets]  # since the rebuild
    assert after == 0


# ------------------------------------------------------------------ a communication hook


def train_with_top_k(rank: int, fraction: float) -> tuple[list[str], list[str], float]:
    """Names that differ from torch's class with the hook, and without; the largest value that was left out."""
    ddp, state = wrap(), TopK(fraction)
    ddp.register_comm_hook(state, top_k)
    ours = train(rank, ddp)
    theirs = torch_trained(rank, lambda other: other.register_comm_hook(TopK(fraction), top_k))
    left_out = max(value.abs().max().item() for value in state.left_out.values())
    return differing(ours, theirs), differing(ours, torch_trained(rank)), left_out


def test_a_hook_with_a_state_is_the_same_one_to_torch(ranks: Ranks) -> None:
    for from_torch, from_mean, left_out in ranks(2).run(train_with_top_k, 0.1):
        assert from_torch == []
        assert from_mean != []
        assert left_out > 0
    assert ranks(2).run(train_with_top_k, 1.0) == [([], [], 0.0)] * 2


# ------------------------------------------------------------------ a bucket policy


@on_ranks(2)
@pytest.mark.parametrize("after_first_step", [False, True])
def test_a_bucket_policy_stays(rank: int, after_first_step: bool) -> None:
    ddp = wrap()
    if after_first_step:  # which shows the order by which the next forward would rebuild the buckets
        ddp(torch.ones(2, 6)).sum().backward()
    ddp.follow(one_bucket_per_block(ddp.plan))
    state = train(rank, ddp)
    assert after_first_step or differing(state, torch_trained(rank)) == []
    blocks = [["2.weight", "2.bias"], ["1.weight", "1.bias"]]
    blocks += [["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]]
    assert [ddp.plan.names(bucket.index) for bucket in ddp.plan.buckets] == blocks


@on_ranks(2)
def test_plans_that_differ_or_lack_a_parameter_are_refused(rank: int) -> None:
    ddp, groups = wrap(), [[7], [0, 1, 2, 3, 4, 5, 6]]
    for given, text in (
        (
            groups[::-1] if rank == 1 else groups,
            r"`the plan's buckets` is \[\[7\], \[0, 1, 2, 3.* on rank 0",
        ),
        (groups[1:], r"each of `ddp\.plan\.params`"),
    ):
        with pytest.raises(RuntimeError, match=text):
            ddp.follow(plan_from_groups(ddp.plan.params, given, "test"))


# ------------------------------------------------------------------ a check of the guard


def train_with_check(rank: int, sizes: list[int]) -> tuple[list[str], list[str]]:
    ddp = wrap()
    ddp.guard.checks["uneven batches"] = UnevenBatches()
    state = train(rank, ddp, sizes[rank])
    dist.barrier()
    with mock.patch.object(comparison, "LAST_S", 10.0):
        ddp.guard.close()
    differs = differing(state, torch_trained(rank)) if len(set(sizes)) == 1 else []
    return differs, [finding.text for finding in ddp.guard.findings]


def test_a_check_of_the_guard_reports_batches_of_different_sizes(ranks: Ranks) -> None:
    (_, (text,)), _ = ranks(2).run(train_with_check, [5, 3])
    assert "in step 0: 5 on rank 0, 3 on rank 1" in text
    assert ranks(2).run(train_with_check, [5, 5]) == [([], [])] * 2


# ------------------------------------------------------------------ a transport


def train_on_threads(world_size: int, **options: object) -> list[State]:
    def body(transport: Transport) -> State:
        return train(transport.rank, wrapped(network(), transport, bucket_cap_mb=CAP_MB, **options))

    return on_threads(world_size, body)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_ranks_as_threads_have_the_bits_of_torch(rank: int, options: dict[str, bool]) -> None:
    """Within each process of torch's ranks: as many threads compute a product there."""
    assert differing(train_on_threads(2, **options)[rank], torch_trained(rank)) == []


def test_three_threads_end_with_equal_replicas_that_differ_from_gloo_by_rounding(ranks: Ranks) -> None:
    first, *others = train_on_threads(3)
    params = [name for name in first if "running" not in name]
    for other in others:
        assert not set(differing(first, other)) & set(params)
    [theirs, *_] = ranks(3).run(torch_trained)
    for name, value in first.items():
        torch.testing.assert_close(value, theirs[name])


def test_threads_differ_at_construction_with_the_same_error() -> None:
    def body(transport: Transport) -> None:
        wrapped(nn.Linear(2 + transport.rank, 1), transport)

    with pytest.raises(RuntimeError, match="appears not to match sizes"):
        on_threads(2, body)


def test_a_thread_that_fails_ends_the_others() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            raise KeyError("rank 0's own")
        transport.all_gather(torch.ones(1))

    with pytest.raises(KeyError, match="rank 0's own"):
        on_threads(2, body)


def test_a_transport_of_ones_own_keeps_its_ranks() -> None:
    def body(transport: Transport) -> None:
        ddp = wrapped(network(), transport)
        with pytest.raises(ValueError, match="transport of your own"):
            ddp.move_to_group(ddp.process_group)

    on_threads(1, body)


def test_all_to_all_on_threads() -> None:
    def body(transport: Transport) -> list[int]:
        received = torch.empty(3, dtype=torch.int64)
        sizes = [transport.rank + 1] * 2  # what each rank gets from me
        transport.all_to_all(received, torch.arange(sum(sizes)) + 10 * transport.rank, [1, 2], sizes).wait()
        return received.tolist()

    assert on_threads(2, body) == [[0, 10, 11], [1, 12, 13]]


# ------------------------------------------------------------------ what an example is


def private_names(source: str) -> list[str]:
    """Names of something else's that begin with an underscore: of modules, attributes but `self._x`, arguments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.keyword):
            found.append(node.arg or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(r"^_\w+$", node.value)
    return [name for name in found if name.startswith("_") and name not in ("__future__", "__init__")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_uses_public_names_only(path: Path) -> None:
    source = path.read_text()
    assert private_names(source) == []


def test_the_table_has_all_examples() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", examples.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == [path.name for path in FILES if path.stem != "__init__"]
