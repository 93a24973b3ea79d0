from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minddp.tools import demo
from minddp.tools.train.checkpoint import CheckpointFiles, load
from tests.tools.train.runs import TINY_GPT, tiny, train_here


def test_the_status_is_whether_the_bits_are_equal(
    ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, out = tmp_path / "trained", tmp_path / "demo"
    for ddp in ("torch", "minddp"):
        ranks(2).run(train_here, tiny(trained / ddp, ddp=ddp, task_options=TINY_GPT))
    started = []

    def launch(nproc: int, module: str, words: list[str]) -> None:
        started.append(run := Path(words[words.index("--out") + 1]))
        assert not (run / "checkpoints").exists()
        if (trained / run.name).exists():
            shutil.copytree(trained / run.name, run, dirs_exist_ok=True)

    monkeypatch.setattr(demo, "launch", launch)
    words = ["--out", str(out), "--repeated-steps", "6"]
    assert demo.main(words) == 0
    assert "Bits equal: yes, after 6 steps" in capsys.readouterr().out
    assert started == [out / "whole", out / "torch", out / "minddp"]
    change_one_bit(trained / "minddp")
    assert demo.main(words) == 1
    assert "Bits equal: NO: model['head.weight']" in capsys.readouterr().out


def change_one_bit(folder: Path) -> None:
    files = CheckpointFiles(folder, keep=1)
    state: dict[str, Any] = load(files.paths()[0])
    state["model"]["head.weight"].view(torch.int32)[0, 0] ^= 1
    files.write(state)
