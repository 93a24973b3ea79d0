"""The GPU's benchmark as far as it has arithmetic, and a rehearsal of it; its figures need a card."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu


@dataclass(frozen=True)
class Event:
    """An event of a profile, with the attributes that are read."""

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
    assert gpu.counted(profiled) == {"launches": 2, "copies": 2}


def test_a_race_is_limited_and_rehearsed_with_tiny_models() -> None:
    options = gpu.GpuOptions(race_s=7.0, device="cpu", size="smoke")
    assert options.race_rounds.limit_s == 7.0
    assert options.workload_size == "tiny"
    assert gpu.GpuOptions(race_s=7.0, device="cuda").workload_size == "gpu"


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert "No NVIDIA GPU here" in capsys.readouterr().out


def test_it_can_be_rehearsed_and_a_contestant_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "measure", without_views)
    for part in ("convnet", "many_small"):
        assert gpu.main([part, "--rehearse", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report["parts"]) == {"convnet", "many_small"}
    done = report["parts"]["many_small"]
    assert len(done["rounds_ms"]["no wrapper"]) == 2
    assert done["contestants"]["minddp static"]["baseline"] == "torch static"
    assert done["failed"] == {"minddp views": "rank 0: ValueError: made up"}
    assert "torch views" in done["contestants"]
    assert "minddp views" not in done["contestants"]
    assert "minddp views FAILED and did not race" in capsys.readouterr().out


measure, contestants_for = gpu.measure, gpu.contestants_for


def without_views(rank: int, *args: Any) -> dict[str, Any]:
    """`measure` on a rank where minddp cannot be wrapped with views."""

    def fails(_model: torch.nn.Module) -> torch.nn.Module:
        raise ValueError("made up")

    gpu.contestants_for = lambda device: [
        replace(c, wrap=fails) if c.name == "minddp views" else c for c in contestants_for(device)
    ]
    return measure(rank, *args)
