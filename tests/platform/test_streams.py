"""What a device is asked for, by a module that only notes it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minddp
from minddp.platform import streams

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 1), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "expected"), [(CPU, False), (CUDA, True), (torch.device("xpu"), True), (MPS, False)]
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
        Stream=lambda device: SimpleNamespace(device=device),
        stream=lambda stream: log.append(("on", stream.device)) or nullcontext(),
        Event=Event,
        current_stream=lambda device: f"current of {device}",
        is_current_stream_capturing=lambda: True,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: log.append(device) or module)
    return log


def test_a_new_stream_is_one_of_its_device(asked: list[Any]) -> None:
    with streams.on_stream(streams.new_stream(CUDA)):
        assert asked == [CUDA, CUDA, ("on", CUDA)]


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
        streams.copied_to(CPU, [1], torch.int32)
    assert pinned == [False, True]


def test_values_are_copied() -> None:
    assert torch.equal(streams.copied_to(CPU, [3, 4], torch.int32), torch.tensor([3, 4], dtype=torch.int32))


@pytest.mark.parametrize(
    "folder", ["core", "expectation", "acceleration", "modes", "replicas", "forecast", "watchdog"]
)
def test_nothing_in_a_step_asks_a_kind_of_device_by_itself(folder: str) -> None:
    package = Path(minddp.__file__).parent
    asks = re.compile(r"torch\.(cuda|xpu|accelerator)\.(?!current_device_index)\w+\(")
    offenders = [path for path in (package / folder).rglob("*.py") if asks.search(path.read_text())]
    assert offenders == []
