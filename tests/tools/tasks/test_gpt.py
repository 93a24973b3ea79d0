from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from minddp.tools.tasks.gpt import GPT, STANDARD_LIBRARY, load_corpus, windows
from minddp.tools.train.settings import SettingsError
from minddp.tools.train.task import cross_entropy


@pytest.fixture
def model() -> GPT:
    """A GPT whose layers all do something: as built, the last ones are zero."""
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=16, context=12)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def test_an_untrained_model_guesses() -> None:
    tokens = torch.randint(256, (2, 8))
    loss = cross_entropy(GPT()(tokens), tokens)
    assert loss.item() == pytest.approx(math.log(256))


def test_a_prediction_depends_on_no_later_byte(model: GPT) -> None:
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:7], after[:7])
    assert not torch.allclose(before[7], after[7])
    assert not torch.allclose(before[11], after[11])  # but later positions depend on it


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Thirty small modules in two packages, and files that are no part of the text."""
    for i in range(30):
        path = tmp_path / ("b" if i % 2 else "a") / f"module_{i:02}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"x = {i:02}\n".encode())
    for skipped in ("test/test_x.py", "site-packages/numpy.py", "a/test/test_y.py", "a/readme.txt"):
        path = tmp_path / skipped
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not this")
    return tmp_path


def test_texts_are_whole_files_up_to_the_limit_and_some_are_held_out(library: Path) -> None:
    """Only the library's own modules are read, in sorted order."""
    texts = [bytes(text.tolist()) for text in load_corpus(library, limit_bytes=10_000)]
    training, held_out = (text.split(b"\0")[:-1] for text in texts)
    assert len(training) + len(held_out) == 30
    assert all(part.startswith(b"x = ") for part in training + held_out)
    assert 0 < len(held_out) < 10
    evens = [part for part in training if int(part.split()[-1]) % 2 == 0]
    assert training == sorted(evens) + sorted(set(training) - set(evens))
    assert [len(text) for text in load_corpus(library, limit_bytes=50)] == [50, 5]


def test_no_source_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="too few for training and validation"):
        load_corpus(tmp_path, limit_bytes=100)


def test_the_standard_library_is_enough_to_train_on() -> None:
    training, held_out = load_corpus(Path(STANDARD_LIBRARY), limit_bytes=2**20)
    assert len(training) == 2**20
    assert len(held_out) > 50_000


def test_targets_are_the_inputs_one_byte_later() -> None:
    samples = windows(torch.arange(10, dtype=torch.uint8), context=3)
    assert len(samples) == 3
    inputs, targets = samples[2]
    assert inputs.tolist() == [6, 7, 8]
    assert targets.tolist() == [7, 8, 9]
