"""The GPU's benchmark as far as it has arithmetic, and a rehearsal of it; its figures need a card."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_models import gpu_workload


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
    sizes = gpu.gradient_sizes(shape, numel)
    assert sum(sizes) == numel
    assert len(sizes) >= 2
    assert min(sizes) > 0


def test_nothing_beside_nothing_is_level() -> None:
    assert [gpu.ratio(0, 0), gpu.ratio(3, 2), gpu.ratio(1, 0)] == [1.0, 1.5, float("inf")]
    assert gpu.aim("x", 0.9, 0.9)["met"]
    assert not gpu.aim("x", 0.91, 0.9)["met"]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert "No NVIDIA GPU here" in capsys.readouterr().out


def test_it_can_be_rehearsed_and_keeps_other_parts(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    for part in ("copies", "many_small"):
        assert gpu.main([part, "--rehearse", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report["parts"]) == {"copies", "many_small"}
    done = report["parts"]["many_small"]
    assert len(done["rounds_ms"]["no wrapper"]) == 4
    assert done["contestants"]["minddp views"]["baseline"] == "torch views"
    assert [one["at_most"] for one in done["targets"]] == [0.90, 1.0, 1.0]
