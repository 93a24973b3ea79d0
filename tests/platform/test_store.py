"""Messages through a store: read without a wait, gathered with a limit, cleared by the last rank."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from minddp.platform.store import Messages, own_connection, value_now

STORES: dict[str, Callable[[Path], dist.Store]] = {
    "TCPStore": lambda _: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "TCPStore without libuv": lambda _: dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
    ),
    "FileStore": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "HashStore": lambda _: dist.HashStore(),
}


@pytest.fixture(params=[(kind, prefixed) for kind in STORES for prefixed in (False, True)], ids=str)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    kind, prefixed = request.param
    made = STORES[kind](tmp_path)
    made = dist.PrefixStore("prefix", made) if prefixed else made
    made.set_timeout(datetime.timedelta(seconds=0.1))
    return made


def two(store: dist.Store) -> list[Messages]:
    return [Messages.open(store, "test", rank, 2) for rank in range(2)]


def test_a_key_is_read_without_a_wait_and_without_making_it(store: dist.Store) -> None:
    num_keys = store.num_keys()
    assert value_now(store, "key") is None
    assert not store.check(["key"])
    assert store.num_keys() == num_keys
    for value in (b"\x80\x05N.", b"\x00\xff", b""):
        store.set("key", value)  # type: ignore[arg-type]  # torch's stub
        assert value_now(store, "key") == store.get("key") == value
    store.delete_key("key")
    assert value_now(store, "key") is None
    assert not store.check(["key"])


def test_a_message_is_read_by_rank_and_taken_once(store: dist.Store) -> None:
    first, second = two(store)
    assert second.read(0, "notes", 3) is None
    first.post({"step": (b"\x00", None)}, "notes", 3)
    assert second.read(0, "notes", 3) == {"step": (b"\x00", None)}
    assert second.read(1, "notes", 3) is None
    assert second.take(0, "notes", 3) == {"step": (b"\x00", None)}
    assert second.take(0, "notes", 3) is None


def test_the_first_proposal_is_settled(store: dist.Store) -> None:
    first, second = two(store)
    assert first.settled("verdict") is None
    assert second.settle(["b"], "verdict") == ["b"]
    assert first.settle(["a"], "verdict") == first.settled("verdict") == ["b"]


def test_a_counter_is_shared(store: dist.Store) -> None:
    first, second = two(store)
    assert [first.count("asked"), second.count("asked"), first.count("asked", add=0)] == [1, 2, 2]


def test_topics_have_serial_numbers_that_ranks_agree_on(store: dist.Store) -> None:
    (first, second), (third, fourth) = two(store), two(store)
    assert first.topic == second.topic != third.topic == fourth.topic
    first.post("early", "key")
    assert second.read(0, "key") == "early"
    assert fourth.read(0, "key") is None


def test_the_last_rank_to_leave_clears_the_keys(store: dist.Store) -> None:
    messages = two(store)
    num_keys = store.num_keys()
    for one in messages:
        one.post(1, "notes")
        one.count("asked")
    for one in messages:
        assert messages[0].read(0, "notes") == 1
        one.leave("notes", "asked")
    assert store.num_keys() == num_keys


def test_messages_that_are_there_come_at_once_and_others_are_left_out() -> None:
    first, _ = two(dist.HashStore())
    first.post("a", "sheet")
    assert first.gather("sheet", limit_s=60.0, ranks=[0]) == {0: "a"}
    assert first.gather("sheet", limit_s=60.0, ranks=[]) == {}
    begin = time.monotonic()
    assert first.gather("sheet", limit_s=0.2) == {0: "a"}
    assert time.monotonic() - begin >= 0.2


def test_all_ranks_arrive() -> None:
    first, second = two(dist.HashStore())
    first.arrive("here", limit_s=60.0)
    first_waits = first.arrive("here", limit_s=60.0)  # a second time: it does not stand for another
    assert not first_waits(0.01)
    second.arrive("elsewhere", limit_s=60.0)
    assert not first_waits(0)
    second_waits = second.arrive("here", limit_s=60.0)
    assert first_waits(0)
    assert second_waits(0)


def test_a_rank_that_never_arrives_is_named_at_the_limit() -> None:
    first, _ = two(dist.HashStore())
    with pytest.raises(RuntimeError, match=r"Rank 1 has not come within 0\.01 s"):
        first.arrive("here", limit_s=0.01)(5)


class DeletedAfterEachCall:
    """A store of which another rank deletes `key` after each call of this one."""

    def __init__(self, store: dist.Store, key: str):
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            try:
                return getattr(self._store, name)(*args)
            finally:
                self._store.delete_key(self._key)

        return call


def test_a_message_that_another_rank_deletes_is_not_waited_for() -> None:
    """A thread would wait in the store when the interpreter ends, which that crashes."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.1))
    messages = Messages(store, "test", 1, 2)
    messages.post({"step": 3}, "notes")
    messages.store = DeletedAfterEachCall(store, "test/notes/1")  # type: ignore[assignment]
    assert messages.read(1, "notes") == {"step": 3}
    assert messages.read(1, "notes") is None


def test_a_clone_waits_for_a_missing_file_for_a_short_time_only(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    store.set_timeout(datetime.timedelta(minutes=30))
    assert (
        own_connection(dist.PrefixStore("default", dist.PrefixStore("group", store))).timeout.total_seconds() == 1
    )
    assert store.timeout == datetime.timedelta(minutes=30)
