from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minddp.tools import demo
from minddp.tools.demo import differences
from minddp.tools.train.checkpoint import CheckpointFiles, load
from tests.tools.train.runs import TINY_GPT, tiny, train_here


@pytest.fixture
def finished(ranks, tmp_path: Path) -> Path:
    """The folder of a demo whose two runs of equal steps have ended."""
    for ddp in ("torch", "minddp"):
        ranks(2).run(train_here, tiny(tmp_path / ddp, ddp=ddp, task_options=TINY_GPT))
    return tmp_path


def test_the_status_is_whether_the_bits_are_equal(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(demo, "launch", lambda nproc, module, words: started.append(words))
    words = ["--out", str(finished), "--steps", "6"]
    assert demo.main(words) == 0
    assert "Bits equal: yes, 6 steps" in capsys.readouterr().out
    assert [words[words.index("--out") + 1] for words in started] == [
        str(finished),
        str(finished / "torch"),
        str(finished / "minddp"),
    ]
    change_one_bit(finished / "minddp")
    assert demo.main(words) == 1
    assert "Bits equal: NO: model['head.weight']" in capsys.readouterr().out


def change_one_bit(folder: Path) -> None:
    files = CheckpointFiles(folder, keep=1)
    state = load(files.paths()[0])
    state["model"]["head.weight"].view(torch.int32)[0, 0] ^= 1
    files.discard()
    files.write(state)


def test_another_loss_is_a_difference(finished: Path) -> None:
    log = finished / "minddp" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"loss": 5.', '"loss": 4.'))
    assert differences(finished / "torch", finished / "minddp") == ["the loss of step 1"]
