"""Exercises: the rungs without the bodies that are to be written; their solutions are the rungs."""

from __future__ import annotations

import ast

import pytest

from reference import exercises
from reference.exercises import without_bodies
from reference.grade import grade
from reference.ladder import RUNGS, rungs

SOURCE = '''"""File."""
class A:
    """Class."""
    x = 1

    def __init__(self) -> None:
        self.kept = 1

    def left_out(self) -> int:
        """Say what."""
        # and how
        return (
            1
        )

    @staticmethod
    def bare():
        return 2


def outside():
    return 3
'''


def test_there_is_one_for_each_rung(tmp_path, capsys):
    exercises.main(tmp_path)
    assert [path.stem.partition("_")[2] for path in sorted(tmp_path.iterdir())] == [*RUNGS]
    for path, printed in zip(sorted(tmp_path.iterdir()), capsys.readouterr().out.splitlines(), strict=True):
        rung = path.stem.partition("_")[2]
        program, _, spec = printed.rpartition(" ")
        assert program == f"python -m {'reference.grade' if rung in rungs(0) else 'reference --yours'}"
        assert spec.startswith(f"{path}:")
        assert spec.partition(":")[2].lower().startswith(rung.replace("_", ""))
        ast.parse(path.read_text())
        assert "yours to write" in path.read_text()


def test_what_is_not_written_is_said_at_once(tmp_path):
    exercises.main(tmp_path)
    *passed, verdict = grade(f"{tmp_path}/1_naive.py:Naive", world_sizes=[2], limit_s=6.0)
    assert all(before.fault is None for before in passed)
    assert verdict.fault == ("unwritten", "Rank 0: NotImplementedError: synchronize: yours to write")


def test_only_bodies_are_left_out():
    left = without_bodies(SOURCE)
    assert left.startswith(SOURCE.partition("        # and how")[0])
    assert "and how" not in left
    namespace: dict = {}
    exec(left, namespace)
    made = namespace["A"]()
    assert made.kept == 1
    for name, function in (("left_out", made.left_out), ("bare", made.bare), ("outside", namespace["outside"])):
        with pytest.raises(NotImplementedError, match=f"{name}: yours to write"):
            function()
