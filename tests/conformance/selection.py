"""Which tests: suites, test ids, and the list kept beside this file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CORE = HERE / "core.txt"
COLLECTIVES = HERE / "collectives.txt"


@dataclass(frozen=True)
class Suite:
    """A module of unittest classes that is imported once, after which each of its tests runs in a fork.

    Attributes:
        name: the first part of its tests' ids; ends in "@cpu" where tests of GPUs run on the CPU.
        module: the name under which it is imported.
    """

    name: str
    module: str
    world_size: int = 2  # of tests that leave it open

    @property
    def on_cpu(self) -> bool:
        return self.name.endswith("@cpu")


def both_ways(name: str, module: str) -> tuple[Suite, Suite]:
    """The suite as it is, and the same on the CPU."""
    return Suite(name, module), Suite(f"{name}@cpu", module)


WHEEL = (
    *both_ways("ddp", "tests.conformance.wheel_ddp"),
    *(Suite(f"collectives-{n}", "tests.conformance.wheel_ddp", world_size=n) for n in (3, 4, 8)),
    *both_ways("rpc", "tests.conformance.wheel_rpc"),
)


@dataclass(frozen=True, order=True)
class TestId:
    """`suite::Class.method`."""

    __test__ = False  # pytest: not a test class
    suite: str
    case: str

    @classmethod
    def parse(cls, text: str) -> TestId:
        suite, separator, case = text.partition("::")
        if not (suite and separator and case.count(".") == 1):
            raise ValueError(f"A test id reads suite::Class.method, but this one is {text!r}.")
        return cls(suite, case)

    @property
    def method(self) -> str:
        return self.case.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.suite}::{self.case}"


def read_list(path: Path) -> list[TestId]:
    """One id a line; empty lines and lines that begin with # are skipped."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [TestId.parse(line) for line in lines if line and not line.startswith("#")]


def by_suite(tests: Iterable[TestId], suites: Iterable[Suite]) -> dict[Suite, list[TestId]]:
    """The tests of each suite that has any.

    Raises:
        ValueError: an id names a suite that is not among `suites`.
    """
    known = {suite.name: suite for suite in suites}
    grouped: dict[Suite, list[TestId]] = {}
    for test in tests:
        if test.suite not in known:
            raise ValueError(f"{test} is of no known suite; there are: {', '.join(known)}.")
        grouped.setdefault(known[test.suite], []).append(test)
    return grouped
