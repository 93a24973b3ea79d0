"""What a rank does with the store when the job is over, or some rank does not come."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from minddp.platform import store as store_module
from minddp.tools.watchdog import inquiry
from minddp.tools.watchdog.inquiry import Inquiry
from minddp.tools.watchdog.rank_state import LEFT, SILENT, RankState


def test_a_store_whose_file_is_gone_does_not_keep_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has seen one rank die removes the folder in which the ranks met, while the others end."""
    monkeypatch.setattr(store_module, "FILE_LIMIT_S", 0.2)
    folder = tmp_path / "meeting"
    folder.mkdir()
    store = dist.FileStore(str(folder / "store"), 2)
    store.set_timeout(datetime.timedelta(minutes=30))
    one = Inquiry(dist.PrefixStore("default", dist.PrefixStore("group", store)), 0, 2, lambda: None)
    shutil.rmtree(folder)
    one.close()
    assert store.timeout == datetime.timedelta(minutes=30)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Inquiry]]:
    monkeypatch.setattr(inquiry, "READ_EVERY_S", 0.01)
    store = dist.HashStore()
    both = [Inquiry(store, rank, 2, lambda: None) for rank in range(2)]
    yield both
    for one in both:
        one.close()


def test_who_does_not_answer_is_not_waited_for_once_there_is_no_need(
    two: list[Inquiry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_LIMIT_S", 3600.0)
    assert two[0].ask(lambda: True) == {0: SILENT, 1: SILENT}


def test_the_last_rank_to_leave_clears_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may wrap hundreds of modules, one after the other."""
    monkeypatch.setattr(inquiry, "READ_EVERY_S", 0.01)
    store = dist.HashStore()
    two = [Inquiry(store, rank, 2, RankState) for rank in range(2)]
    two[0].close()
    assert two[1]._absence(0) == LEFT
    two[1].close()
    assert store.num_keys() == len(["opened by rank 0", "opened by rank 1"])
