"""The tests notice faults: unit tests those of their room, the comparison with torch those of the core."""

from __future__ import annotations

import ast
import random

import pytest

from tests.mutants.forks import noting_calls, outcomes, place_of
from tests.mutants.operators import PACKAGE, Mutant, changes, mutants_of
from tests.mutants.replaced import Break, StaleBreak, apply
from tests.parity.script import Line, Options, Script
from tests.parity.verdict import Report, play
from tests.ranks import RankFailure, RankPool

SEED = 0


def sample(number: int | None, files: str) -> list[Mutant]:
    """Some or all mutants of these files of minddp/, in an order that changes only with the source."""
    paths = sorted(PACKAGE.glob(files))
    mutants = [mutant for path in paths for mutant in mutants_of(path.relative_to(PACKAGE).as_posix())]
    return random.Random(SEED).sample(mutants, number or len(mutants))


# ------------------------------------------------------------------ by unit tests


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("room", "share"), [("core", 0.7), ("tools/watchdog", 0.4)])
def test_unit_tests_notice_most_mutants_of_their_room(room: str, share: float) -> None:
    """Some change nothing that matters, so not all can be noticed."""
    found = list(outcomes(sample(60, f"{room}/*.py"), [room]))
    survivors = [str(outcome.mutant) for outcome in found if outcome.survived]
    assert len(found) > 40
    assert len(survivors) <= (1 - share) * len(found), "\n".join(survivors)


# ------------------------------------------------------------------ against torch, on real ranks


SCRIPT = Script(
    ("large", "branch by rank", "norm", "large"),
    Options(bucket_cap_mb=0.06, find_unused_parameters=True),
    (Line("reorder", (0,)), Line("train"), Line("windows", (1,)), Line("train")),
    world_size=3,  # halves are exact, thirds are not
    apart=True,
)


def functions_called(rank: int) -> set[tuple[str, str]]:
    """The functions of the core that the script calls, by file and name."""
    with noting_calls() as codes:
        assert play(rank, SCRIPT).failure is None
    return {place for place in map(place_of, codes) if place is not None and place[0].startswith("core/")}


def run_mutated(rank: int, mutant: Mutant) -> Report:
    undo = apply(mutant)
    try:
        return play(rank, SCRIPT)
    finally:
        undo()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_comparison_with_torch_notices_many_mutants() -> None:
    survivors = []
    pool = RankPool(3, group_timeout_s=10.0)
    try:
        called = pool.run(functions_called)[0]
        mutants = [mutant for mutant in sample(None, "core/*.py") if (mutant.file, mutant.function) in called][:24]
        for mutant in mutants:
            try:
                noticed = any(report.failure for report in pool.run(run_mutated, mutant, timeout_s=60.0))
            except RankFailure:
                noticed = True
            if not noticed:
                survivors.append(str(mutant))
    finally:
        pool.kill()
    assert len(survivors) <= 2 / 3 * len(mutants), "\n".join(survivors)


# ------------------------------------------------------------------ the operators


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if a:\n    b", "if not a:\n    b"),
        ("while a:\n    b", "while not a:\n    b"),
        ("a if b else c", "a if not b else c"),
        ("[a for a in b if c]", "[a for a in b]"),
        ("a < b", "a <= b"),
        ("a is b", "a is not b"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("a + b", "a - b"),
        ("a += b", "a -= b"),
        ("True", "False"),
        ("1", "2"),
        ("a()", "pass"),
        ("a.b = c", "pass"),
        ("raise a", "pass"),
        ("with a:\n    b", "if True:\n    b"),
        ("try:\n    a\nfinally:\n    b", "try:\n    a\nfinally:\n    pass"),
    ],
)
def test_an_operator(before: str, after: str) -> None:
    (statement,) = ast.parse(before).body
    node = statement.value if isinstance(statement, ast.Expr) and not changes_of(statement) else statement
    node = node.generators[0] if isinstance(node, ast.ListComp) else node
    ((_, changed),) = changes(node)

    class Replace(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return changed if visited is node else self.generic_visit(visited)

    assert ast.unparse(Replace().visit(statement)) == after


def changes_of(node: ast.AST) -> list[str]:
    return [operator for operator, _ in changes(node)]


@pytest.mark.parametrize("text", ["a = b", "'text'", "a", "f(a)[0] == 'b' == c", "with a as b:\n    c"])
def test_no_operator(text: str) -> None:
    (statement,) = ast.parse(text).body
    assert changes_of(statement) == []


def test_every_mutant_of_a_file_is_another_source() -> None:
    source = (PACKAGE / "core/plan.py").read_text()
    mutants = mutants_of("core/plan.py")
    texts = {ast.unparse(mutant.applied_to(source)) for mutant in mutants}
    assert len(texts) == len(mutants) > 30
    assert ast.unparse(ast.parse(source)) not in texts


def test_a_mutant_is_put_in_place_and_undone() -> None:
    from minddp.core.plan import BucketPlan

    mutant = mutants_of("core/plan.py")[0]
    codes = {name: member.__code__ for name, member in vars(BucketPlan).items() if hasattr(member, "__code__")}
    undo = apply(mutant)
    undo()
    assert all(vars(BucketPlan)[name].__code__ is code for name, code in codes.items())


# ------------------------------------------------------------------ breaks by text


def test_a_break_that_changes_no_function_says_so() -> None:
    with pytest.raises(ValueError, match="changes no function"):
        apply(Break("nothing", "core/plan.py", "It needs no tensors", "It needs nothing"))


@pytest.mark.parametrize("source", ["nothing of the kind", "two\ntwo"])
def test_a_stale_break_says_so(source: str) -> None:
    with pytest.raises(StaleBreak, match=r"Break `rot` replaces text that occurs \d times"):
        Break("rot", "core/plan.py", "two", "three").applied_to(source)
