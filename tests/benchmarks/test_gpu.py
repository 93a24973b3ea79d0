"""The GPU's benchmark as far as it has arithmetic, and a rehearsal of it; its figures need a card."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.gpu.copies import gradient_sizes

from benchmarks.contestants import Contestant
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import aims, steps
from benchmarks.gpu.device import counted
from benchmarks.gpu.models import gpu_workload


@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_models_have_the_size_that_their_name_promises(name: str) -> None:
    with torch.device("meta"):
        parameters = list(gpu_workload(name).model().parameters())
    tensors, elements = {"resnet50": (161, 25_557_032), "gpt2": (148, 124_439_808)}[name]
    assert len(parameters) == tensors
    assert math.isclose(sum(p.numel() for p in parameters), elements, rel_tol=0.005)


@pytest.mark.parametrize("shape", ["large", "small"])
@pytest.mark.parametrize("numel", [2, 1000, 13_107_200])
def test_gradients_fill_the_bucket(shape: str, numel: int) -> None:
    sizes = gradient_sizes(shape, numel)
    assert sum(sizes) == numel
    assert len(sizes) >= 2
    assert min(sizes) > 0


def test_nothing_beside_nothing_is_level() -> None:
    assert [aims.ratio(0, 0), aims.ratio(3, 2), aims.ratio(1, 0)] == [1.0, 1.5, float("inf")]
    assert aims.aim("x", 0.9, 0.9)["met"]
    assert not aims.aim("x", 0.91, 0.9)["met"]


def test_where_all_of_a_side_have_failed_nothing_is_compared() -> None:
    alone = [Contestant("torch default", "default", "torch default")]
    assert aims.met_by("gpt2", alone, {"torch default": np.ones(4)}, {}, ranks=1, seed=0) == []


@dataclass(frozen=True)
class Event:
    """Of a profile, as much as is looked at."""

    name: str
    device: str

    @property
    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.device)


def test_kernels_are_counted_where_they_run() -> None:
    """Launches by the runtime and by the driver count once, and a named span is no kernel."""
    profiled = [
        Event("DistributedDataParallel.forward", "CPU"),
        Event("DistributedDataParallel.forward", "CUDA"),
        Event("cudaLaunchKernel", "CPU"),
        Event("cuLaunchKernel", "CPU"),
        Event("vectorized_elementwise_kernel", "CUDA"),
        Event("move_chunks", "CUDA"),
        Event("Memcpy DtoD (Device -> Device)", "CUDA"),
        Event("Memset (Device)", "CUDA"),
    ]
    assert counted(profiled) == {"launches": 2, "copies": 2}


def test_no_round_begins_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the fewest that can be compared take place."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(steps, "any_rank", lambda says_so, _device: says_so)
    ran: list[str] = []
    model = torch.nn.Linear(1, 1)
    for limit_s, rounds in ((-1.0, 3), (100.0, 5)):
        turns = steps.race({"a": lambda: ran.append("a")}, {"a": model}, [["a"]] * 5, 2, "cpu", limit_s, fewest=3)
        assert len(turns["a"]) == rounds
    assert len(ran) == (3 + 5) * 3, "an untimed step and two timed ones in each"


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    assert "No NVIDIA GPU here" in capsys.readouterr().out


def test_it_can_be_rehearsed_and_who_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(command, "steps", SimpleNamespace(measure=without_views))
    for part in ("copies", "many_small"):
        assert command.main([part, "--rehearse", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report["parts"]) == {"copies", "many_small"}
    done = report["parts"]["many_small"]
    assert len(done["rounds_ms"]["no wrapper"]) == 4
    assert done["contestants"]["minddp static"]["baseline"] == "torch static"
    assert done["failed"] == {"minddp views": "rank 0: ValueError: made up"}
    assert "torch views" in done["contestants"]
    assert "minddp views" not in done["contestants"]
    assert [one["what"][:10] for one in done["targets"]] == ["step time:", "launches: "], (
        "and not memory with views"
    )


def without_views(rank: int, *args: Any) -> dict[str, Any]:
    """On the rank: minddp with views cannot be wrapped."""
    original = steps.contestants_for

    def fails(_model: torch.nn.Module) -> torch.nn.Module:
        raise ValueError("made up")

    steps.contestants_for = lambda device: [
        replace(c, wrap=fails) if c.name == "minddp views" else c for c in original(device)
    ]
    return steps.measure(rank, *args)
