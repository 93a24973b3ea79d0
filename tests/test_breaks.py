"""Breaks: they are put in place and undone, and one that the source has left behind says so."""

from __future__ import annotations

import pytest

from minddp.core.plan import BucketPlan
from tests.breaks import Break, StaleBreak, apply


def test_a_break_is_put_in_place_and_undone() -> None:
    codes = {name: member.__code__ for name, member in vars(BucketPlan).items() if hasattr(member, "__code__")}
    undo = apply(Break("no names", "core/plan.py", "return [", "return [] and ["))
    assert any(vars(BucketPlan)[name].__code__ is not code for name, code in codes.items())
    undo()
    assert all(vars(BucketPlan)[name].__code__ is code for name, code in codes.items())


def test_a_break_that_changes_no_function_says_so() -> None:
    with pytest.raises(ValueError, match="changes no function"):
        apply(Break("nothing", "core/plan.py", "It needs no tensors", "It needs nothing"))


@pytest.mark.parametrize("source", ["nothing of the kind", "two\ntwo"])
def test_a_stale_break_says_so(source: str) -> None:
    with pytest.raises(StaleBreak, match=r"Break `rot` replaces text that occurs \d times"):
        Break("rot", "core/plan.py", "two", "three").applied_to(source)
