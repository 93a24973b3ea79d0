from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.ladder import Config, Rung, record_all, record_rung
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import load
from reference.automatic import Automatic
from reference.bucketed import Bucketed
from reference.flat import Flat
from reference.naive import Naive
from reference.overlapped import Overlapped
from tests.ranks import RankPool

TINY = Config(depth=3, width=16, batch_size=4, cap_mib=0.001, warmup_steps=1, steps=2)


def recorded(rank: int, make: Rung) -> Recording:
    recording = record_rung("rung", make, rank, TINY).recording
    dist.barrier()
    return recording


def bucketed(module: object) -> Bucketed:
    return Bucketed(module, cap_bytes=1000)


def automatic(module: object) -> Automatic:
    return Automatic(module, cap_bytes=1000)


@pytest.mark.parametrize(
    ("make", "messages", "in_backward"),
    [(Naive, 6, 0), (Flat, 1, 0), (Overlapped, 6, 6), (bucketed, 3, 3), (automatic, 3, 3)],
    ids=["naive", "flat", "overlapped", "bucketed", "automatic"],
)
def test_a_rung_is_seen_as_it_describes_itself(
    ranks: Callable[[int], RankPool], make: Rung, messages: int, in_backward: int
) -> None:
    for step in steps_of(ranks(2).run(recorded, make)[0]):
        for rank in step.ranks:
            assert len(rank.ready_ns) == 6
            assert len(rank.buckets) == messages
            launched = [bucket.launched_ns for bucket in rank.buckets]
            assert sum(t_ns <= rank.gradients_complete_ns for t_ns in launched) == in_backward
            for bucket in rank.buckets:
                assert rank.ready_ns[bucket.last_param] <= bucket.launched_ns <= bucket.completed_ns
                assert bucket.completion_was_seen
            assert sorted(slot.param for b in rank.plan.buckets for slot in b.slots) == list(range(6))


def all_recorded(rank: int, folder: str) -> None:
    record_all(rank, Config(**{**vars(TINY), "out": Path(folder)}))
    dist.barrier()


def test_the_ladder_is_drawn_beside_both_wrappers(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ranks(2).run(all_recorded, str(tmp_path))
    for name in ("naive", "flat", "overlapped", "bucketed", "automatic", "torch's DDP", "minddp"):
        assert load(tmp_path / f"{name}.json").recording.title == name
        assert (tmp_path / f"{name}.html").exists()
    assert (tmp_path / "ladder.png").exists()
