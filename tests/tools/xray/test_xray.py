"""With real ranks: which of them record, what is gathered, and that nothing else changes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from minddp.core.events import EventKind
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity
from minddp.tools.xray.xray import XRay
from tests.ranks import RankPool

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


def bits(ddp: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())).hexdigest()


def recorded(rank: int, recording_ranks: list[int], kind: str, folder: str) -> Recording | None:
    ddp = wrapped(nn.parallel.DistributedDataParallel if kind == "torch" else None)
    train(ddp, 3, rank)
    if rank not in recording_ranks:
        train(ddp, 2, rank)
        return None
    with minddp.xray(ddp, title="four layers", limit_s=100) as x:
        train(ddp, 2, rank)
    x.save(Path(folder, "step.json"))
    return x.result.recording


@pytest.mark.parametrize("kind", ["minddp", "torch"])
def test_all_ranks_are_gathered_on_the_first(ranks: Callable[[int], RankPool], tmp_path: Path, kind: str) -> None:
    first, second = ranks(WORLD).run(recorded, [0, 1], kind, str(tmp_path))
    assert [rank.rank for rank in first.ranks] == [0, 1]
    assert [rank.rank for rank in second.ranks] == [1]
    assert first.title == "four layers"
    assert {rank.clock_error_ns for rank in first.ranks} == {0}
    assert first.notes == ()
    steps = steps_of(first)
    assert len(steps) == 2
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


def test_steps_are_numbered_by_the_backwards_before_them(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    first, _ = ranks(WORLD).run(recorded, [0, 1], "minddp", str(tmp_path))
    assert [step.number for step in steps_of(first)] == [3, 4]


@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_may_record_alone(ranks: Callable[[int], RankPool], tmp_path: Path, alone: int) -> None:
    recordings = ranks(WORLD).run(recorded, [alone], "minddp", str(tmp_path))
    assert recordings[1 - alone] is None
    assert [rank.rank for rank in recordings[alone].ranks] == [alone]
    assert f"Rank {1 - alone} did not record" in recordings[alone].notes[0]
    assert (tmp_path / "step.json").exists()


def again(rank: int) -> list[int]:
    """Rank 0 records alone, then both at the same step, then both at another."""
    ddp = wrapped()
    sizes = []
    for recording_ranks in ([0], [0, 1], [0, 1]):
        if rank in recording_ranks:
            with minddp.xray(ddp, limit_s=100) as x:
                train(ddp, 1, rank)
            sizes.append(len(x.result.recording.ranks))
        else:
            train(ddp, 1, rank)
    return sizes


def test_recordings_may_follow_each_other(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(WORLD).run(again) == [[1, 2, 2], [1, 1]]


def trained(rank: int, records: bool, options: dict[str, Any]) -> str:
    ddp = wrapped(**options)
    if records:
        with minddp.xray(ddp, limit_s=100):
            train(ddp, 4, rank)
    else:
        train(ddp, 4, rank)
    return bits(ddp)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: "+".join(options) or "default",
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_recording_changes_no_bit(ranks: Callable[[int], RankPool], options: dict[str, Any]) -> None:
    pool = ranks(WORLD)
    assert pool.run(trained, True, options) == pool.run(trained, False, options)


def trained_by_torch(rank: int, records: bool) -> str:
    ddp = wrapped(nn.parallel.DistributedDataParallel)
    if records:
        with minddp.xray(ddp, limit_s=100):
            train(ddp, 4, rank)
    else:
        train(ddp, 4, rank)
    return bits(ddp)


def test_recording_torchs_wrapper_changes_no_bit(ranks: Callable[[int], RankPool]) -> None:
    pool = ranks(WORLD)
    assert pool.run(trained_by_torch, True) == pool.run(trained_by_torch, False)


def accumulated(rank: int) -> list[tuple[str, int]]:
    ddp = wrapped()
    train(ddp, 2, rank)
    with minddp.xray(ddp, limit_s=100) as x:
        for _ in range(2):
            with ddp.no_sync():
                ddp(torch.ones(2, 32)).sum().backward()
            train(ddp, 1, rank)
    (step, _), events = steps_of(x.result.recording), x.result.recording.ranks[0].events
    spans = [(activity.value, sum(s.activity is activity for s in step.ranks[0].spans)) for activity in Activity]
    return [*spans, ("no_sync", sum(event.kind is EventKind.NO_SYNC for event in events))]


def test_accumulation_is_one_step_with_two_forwards(ranks: Callable[[int], RankPool]) -> None:
    counts = dict(ranks(WORLD).run(accumulated)[0])
    assert counts["forward"] == counts["between forward and backward"] == counts["backward"] == 2
    assert counts["optimizer"] == 1
    assert counts["no_sync"] == 2, "one in each of the two steps"


def hooked(rank: int) -> list[EventKind]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp = wrapped()
    ddp.register_comm_hook(None, fp16_compress_hook)
    train(ddp, 2, rank)
    with minddp.xray(ddp, limit_s=100) as x:
        train(ddp, 1, rank)
    return [event.kind for event in x.result.recording.ranks[0].events]


def test_a_communication_hook_can_be_seen(ranks: Callable[[int], RankPool]) -> None:
    kinds = ranks(WORLD).run(hooked)[0]
    assert kinds.count(EventKind.COMM_HOOK_RETURNED) == kinds.count(EventKind.BUCKET_COMPLETED) == 4


def failed(rank: int) -> str:
    """An exception ends the recording of each rank."""
    ddp = wrapped()
    train(ddp, 2, rank)
    x = minddp.xray(ddp, limit_s=100)
    with contextlib.suppress(ZeroDivisionError), x:
        train(ddp, 1, rank)
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="or by an exception") as caught:
        _ = x.result
    return str(caught.value)


def test_an_exception_discards_the_recording(ranks: Callable[[int], RankPool]) -> None:
    ranks(WORLD).run(failed)


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
    return [r.rank for r in x.result.recording.ranks], x.result.recording.notes[0]


def test_the_wait_for_a_missing_rank_has_a_limit() -> None:
    pool = RankPool(WORLD)
    try:
        members, note = pool.run(missing_peer)[0]
    finally:
        pool.kill()
    assert members == [0]
    assert "could not meet within 6 s" in note


def test_a_recording_under_way_has_no_result(ranks: Callable[[int], RankPool]) -> None:
    assert "has not ended yet" in ranks(WORLD).run(asked_too_early)[0]


def asked_too_early(rank: int) -> str:
    x = minddp.xray(wrapped())
    with pytest.raises(RuntimeError) as caught:
        x.save("step.html")
    return str(caught.value)


def test_only_a_wrapper_can_be_recorded() -> None:
    with pytest.raises(TypeError, match=r"but got Linear\. Wrap the module first"):
        XRay(nn.Linear(2, 2))


def test_the_package_can_be_called_whatever_was_imported_before() -> None:
    import minddp.tools.xray.page

    with pytest.raises(TypeError, match="Wrap the module first"):
        minddp.xray(nn.Linear(2, 2))
    assert minddp.tools.xray.page.render is not None


def hooked_already(rank: int) -> str:
    ddp = wrapped(nn.parallel.DistributedDataParallel)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="has a communication hook already") as caught:
        minddp.xray(ddp)
    return str(caught.value)


def test_torchs_wrapper_with_a_hook_of_its_own_is_refused(ranks: Callable[[int], RankPool]) -> None:
    ranks(WORLD).run(hooked_already)
