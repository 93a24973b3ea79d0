"""Keys of a store are read without a wait, and waited for with a limit."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from minddp.platform.store import value_now, values_within


def test_values_that_are_there_come_at_once_and_those_that_are_not_are_left_out() -> None:
    store = dist.HashStore()
    store.set("a", "1")
    assert values_within(store, {3: "a"}, 60.0) == {3: b"1"}
    assert values_within(store, {}, 60.0) == {}
    begin = time.monotonic()
    assert values_within(store, {3: "a", 4: "b"}, 0.2) == {3: b"1"}
    assert time.monotonic() - begin >= 0.2


STORES: dict[str, Callable[[Path], dist.Store]] = {
    "TCPStore": lambda _: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "TCPStore without libuv": lambda _: dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
    ),
    "FileStore": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "HashStore": lambda _: dist.HashStore(),
}


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("kind", STORES)
def test_a_key_is_read_without_a_wait_and_without_making_it(kind: str, prefixed: bool, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    store = dist.PrefixStore("prefix", store) if prefixed else store
    store.set_timeout(datetime.timedelta(seconds=0.1))
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
