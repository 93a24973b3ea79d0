from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minddp.tools.tasks.corpus import STANDARD_LIBRARY, ByteWindows, is_held_out, load_corpus, source_files
from minddp.tools.train.settings import SettingsError


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


def test_only_the_librarys_own_modules_are_read_in_sorted_order(library: Path) -> None:
    files = source_files(library)
    assert files == sorted(files)
    assert len(files) == 30
    assert all("test" not in path and "site-packages" not in path for path in files)


def test_some_files_are_held_out(library: Path) -> None:
    files = source_files(library)
    assert 0 < sum(map(is_held_out, files)) < len(files) / 3


def test_texts_are_whole_files_up_to_the_limit(library: Path) -> None:
    training, held_out = load_corpus(library, limit_bytes=10_000)
    validation = [path for path in source_files(library) if is_held_out(path)]
    assert len(training) == 8 * (30 - len(validation))  # seven bytes and a separator
    assert bytes(held_out.tolist()).split(b"\0")[0] == (library / validation[0]).read_bytes()
    training, held_out = load_corpus(library, limit_bytes=50)
    assert (len(training), len(held_out)) == (50, 5)


def test_no_source_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="too few for training and validation"):
        load_corpus(tmp_path, limit_bytes=100)


def test_the_standard_library_is_enough_to_train_on() -> None:
    training, held_out = load_corpus(STANDARD_LIBRARY, limit_bytes=2**20)
    assert len(training) == 2**20
    assert len(held_out) > 50_000


def test_targets_are_the_inputs_one_byte_later() -> None:
    windows = ByteWindows(torch.arange(10, dtype=torch.uint8), context=3)
    assert len(windows) == 3
    inputs, targets = windows[2]
    assert inputs.tolist() == [6, 7, 8]
    assert targets.tolist() == [7, 8, 9]
