"""With real ranks: which of them record, what is gathered, and that nothing else changes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import minddp
from minddp.core.events import EventKind
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity
from tests.ranks import RankPool, on_ranks

WORLD = 2


def wrapped(kind: type[nn.Module] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    return (kind or minddp.DistributedDataParallel)(model, **{"bucket_cap_mb": 0.004, **options})


def train(ddp: nn.Module, steps: int, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for _ in range(steps):
        ddp(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(rank: int, recording_ranks: list[int], kind: str, folder: str) -> Recording | None:
    ddp = wrapped(nn.parallel.DistributedDataParallel if kind == "torch" else None)
    train(ddp, 3, rank)
    if rank not in recording_ranks:
        train(ddp, 2, rank)
        return None
    with minddp.xray(ddp, title="four layers", limit_s=100) as x:
        train(ddp, 2, rank)
    x.save(Path(folder, "step.json"))
    return x.recording


@pytest.mark.parametrize("kind", ["minddp", "torch"])
def test_all_ranks_are_gathered_on_the_first(ranks: Callable[[int], RankPool], tmp_path: Path, kind: str) -> None:
    first, second = ranks(WORLD).run(recorded, [0, 1], kind, str(tmp_path))
    assert [rank.rank for rank in first.ranks] == [0, 1]
    assert [rank.rank for rank in second.ranks] == [1]
    assert first.title == "four layers"
    assert {rank.clock_error_ns for rank in first.ranks} == {0}
    assert first.notes == ()
    steps = steps_of(first)
    before = 3 if kind == "minddp" else 0  # backwards; torch's wrapper was not watched during these
    assert [step.number for step in steps] == [before, before + 1]
    for step in steps:
        assert len(step.plan.buckets) == 4
        for rank in step.ranks:
            assert len(rank.ready_ns) == 8
            for bucket in rank.buckets:
                assert bucket.completion_was_seen
                assert rank.ready_ns[bucket.last_param] <= bucket.launched_ns
                assert bucket.launched_ns <= bucket.completed_ns <= bucket.waited_ns
            assert rank.parts_ns[Activity.OPTIMIZER] > 0
            assert sum(rank.parts_ns.values()) == rank.length_ns
    assert (tmp_path / "step.json").exists()


@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_may_record_alone(ranks: Callable[[int], RankPool], tmp_path: Path, alone: int) -> None:
    recordings = ranks(WORLD).run(recorded, [alone], "minddp", str(tmp_path))
    assert recordings[1 - alone] is None
    assert [rank.rank for rank in recordings[alone].ranks] == [alone]
    assert f"Rank {1 - alone} did not record" in recordings[alone].notes[0]
    assert (tmp_path / "step.json").exists()


@on_ranks(WORLD)
def test_recordings_may_follow_each_other(rank: int) -> None:
    """Rank 0 records alone, then both at the same step, then both at another."""
    ddp = wrapped()
    sizes = []
    for recording_ranks in ([0], [0, 1], [0, 1]):
        with minddp.xray(ddp, limit_s=100) if rank in recording_ranks else contextlib.nullcontext() as x:
            train(ddp, 1, rank)
        sizes += [] if x is None else [len(x.recording.ranks)]
    assert sizes == ([1, 1] if rank else [1, 2, 2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.parallel.DistributedDataParallel, {}),
        (None, {}),
        (None, {"gradient_as_bucket_view": True}),
        (None, {"static_graph": True}),
        (None, {"find_unused_parameters": True}),
    ],
    ids=["torch", "default", "gradient_as_bucket_view", "static_graph", "find_unused_parameters"],
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@on_ranks(WORLD)
def test_recording_changes_no_bit(rank: int, kind: type[nn.Module] | None, options: dict[str, Any]) -> None:
    recorded, alone = wrapped(kind, **options), wrapped(kind, **options)
    with minddp.xray(recorded, limit_s=100):
        train(recorded, 4, rank)
    train(alone, 4, rank)
    assert all(map(torch.equal, recorded.parameters(), alone.parameters()))


@on_ranks(WORLD)
def test_accumulation_is_one_step_with_two_forwards(rank: int) -> None:
    ddp = wrapped()
    train(ddp, 2, rank)
    with minddp.xray(ddp, limit_s=100) as x:
        for _ in range(2):
            with ddp.no_sync():
                ddp(torch.ones(2, 32)).sum().backward()
            train(ddp, 1, rank)
    (step, _), events = steps_of(x.recording), x.recording.ranks[0].events
    counts = Counter(span.activity for span in step.ranks[0].spans)
    assert counts[Activity.FORWARD] == counts[Activity.LOSS] == counts[Activity.BACKWARD] == 2
    assert counts[Activity.OPTIMIZER] == 1
    assert [event.kind for event in events].count(EventKind.NO_SYNC) == 2, "one in each of the two steps"


@on_ranks(WORLD)
def test_a_communication_hook_can_be_seen(rank: int) -> None:
    ddp = wrapped()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp, 2, rank)
    with minddp.xray(ddp, limit_s=100) as x:
        train(ddp, 1, rank)
    kinds = [event.kind for event in x.recording.ranks[0].events]
    assert kinds.count(EventKind.COMM_HOOK_RETURNED) == kinds.count(EventKind.BUCKET_COMPLETED) == 4


@on_ranks(WORLD)
def test_an_exception_discards_the_recording(rank: int) -> None:
    ddp = wrapped()
    train(ddp, 2, rank)
    x = minddp.xray(ddp, limit_s=100)
    with contextlib.suppress(ZeroDivisionError), x:
        train(ddp, 1, rank)
        with pytest.raises(RuntimeError, match="has not ended yet"):
            x.save("step.html")
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="or an exception has ended it"):
        _ = x.recording


def missing_peer(rank: int) -> tuple[list[int], str]:
    """Rank 1 begins to record, and never comes to the end of it."""
    ddp = wrapped()
    train(ddp, 2, rank)
    x = minddp.xray(ddp, limit_s=6)
    x.start()
    train(ddp, 1, rank)
    if rank == 1:
        return [], ""
    x.stop()
    return [r.rank for r in x.recording.ranks], x.recording.notes[0]


def test_the_wait_for_a_missing_rank_has_a_limit() -> None:
    pool = RankPool(WORLD)
    try:
        members, note = pool.run(missing_peer)[0]
    finally:
        pool.kill()
    assert members == [0]
    assert "could not meet within 6 s" in note


def test_only_a_wrapper_can_be_recorded_whatever_was_imported_before() -> None:
    import minddp.tools.xray.page

    with pytest.raises(TypeError, match=r"but got Linear\. Wrap the module first"):
        minddp.xray(nn.Linear(2, 2))
    assert minddp.tools.xray.page.render is not None


@on_ranks(WORLD)
def test_torchs_wrapper_with_a_hook_of_its_own_is_refused(rank: int) -> None:
    ddp = wrapped(nn.parallel.DistributedDataParallel)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="has a communication hook already"):
        minddp.xray(ddp)
