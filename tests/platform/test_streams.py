"""What a device is asked for, by a module that only notes it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minddp
from minddp.platform import streams

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 1), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "expected"),
    [(CPU, False), (CUDA, True), (torch.device("xpu"), True), (MPS, hasattr(torch.mps, "Stream"))],
)
def test_accelerators_with_streams_are_known_by_them(device: torch.device, expected: bool) -> None:
    assert streams.has_streams(device) == expected


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool):
            log.append(("event", enable_timing))

        def record(self, stream: object) -> None:
            log.append(("record", stream))

    module = SimpleNamespace(
        Event=Event,
        current_stream=lambda device: f"current of {device}",
        is_current_stream_capturing=lambda: True,
        device_count=lambda: 3,
        get_device_properties=lambda device: f"properties of {device}",
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: log.append(device) or module)
    return log


def test_a_timed_event_is_recorded_on_the_current_stream_of_its_device(asked: list[Any]) -> None:
    streams.timed_event(CUDA)
    assert asked == [CUDA, ("event", True), ("record", "current of cuda:1")]


def test_a_device_that_cannot_capture_never_does(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams.is_capturing(CUDA)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: SimpleNamespace())
    assert not streams.is_capturing(CUDA)


def test_values_for_a_device_with_streams_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory, **kw: pinned.append(pin_memory) or make(*a, **kw))
    for has in (False, True):
        monkeypatch.setattr(streams, "has_streams", lambda _device, has=has: has)
        assert streams.copied_to(CPU, [3, 4], torch.int32).tolist() == [3, 4]
    assert pinned == [False, True]


def test_what_a_device_is_asked_for_by_its_name(asked: list[Any]) -> None:
    assert streams.num_devices("cuda") == 3
    assert streams.properties(CUDA) == "properties of cuda:1"


def test_memory_is_kept_for_the_current_stream(asked: list[Any]) -> None:
    tensor = SimpleNamespace(device=CUDA, record_stream=lambda stream: asked.append(("kept for", stream)))
    streams.keep_for_current_stream(tensor)  # type: ignore[arg-type]
    assert asked == [CUDA, ("kept for", "current of cuda:1")]
    streams.keep_for_current_stream(torch.ones(1))
    assert len(asked) == 2, "the CPU has no streams"


def test_no_other_file_asks_a_kind_of_device_by_its_name() -> None:
    """But the transport that is for CUDA alone, and what stands in for CUDA."""
    package = Path(minddp.__file__).parent
    asks = re.compile(r"torch\.(cuda|xpu)\b|torch\.accelerator\.(?!current_device_index)")
    asking = (path for path in package.rglob("*.py") if asks.search(path.read_text()))
    names = [path.relative_to(package).as_posix() for path in asking]
    excepted = ("transport/nccl/", "tools/launch/on_cpu/")
    assert [name for name in names if not name.startswith(excepted)] == ["platform/streams.py"]
