"""One mutation, and a copy of minddp to which it is applied."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.parity.runner import Report, run_scenario
from tests.parity.scenario import Scenario

#: What `minddp.launch` imports on each rank.
OF_THE_STARTER = {"minddp", "minddp.platform", "minddp.platform.ranks"}


class StaleMutation(AssertionError):
    """The text that a mutation replaces is not in the source, or not only once."""


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in minddp/`file`.

    Then one of `tests` (a file below tests/, or one test in it as pytest names it) fails, or `scenario` reports
    what the pattern `shows` matches.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str = ""
    scenario: Scenario | None = None
    shows: str = r"gradient of .* differs in"

    def applied_to(self, source: str) -> str:
        """The mutated source.

        Raises:
            StaleMutation: `old` does not occur exactly once.
        """
        if source.count(self.old) != 1:
            raise StaleMutation(
                f"Mutation `{self.name}` replaces text that occurs {source.count(self.old)} times in "
                f"minddp/{self.file}, not once:\n{self.old}\nBring it up to date with the source."
            )
        return source.replace(self.old, self.new)


def copy_of_minddp(directory: Path, mutation: Mutation | None = None) -> Path:
    """A folder to put first on the path, holding minddp with the mutation applied."""
    original = find_spec("minddp")
    assert original is not None
    assert original.origin is not None
    package = directory / "minddp"
    shutil.copytree(Path(original.origin).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutation is not None:
        target = package / mutation.file
        target.write_text(mutation.applied_to(target.read_text()))
    return directory


def run_scenario_with(rank: int, directory: Path, scenario: Scenario) -> Report:
    """`run_scenario` on a fresh rank that imports minddp from `directory`."""
    if str(directory) not in sys.path:
        imported = {name for name in sys.modules if name.partition(".")[0] == "minddp"}
        assert imported <= OF_THE_STARTER, f"the rank has imported {imported} before; it must be a fresh one"
        for name in imported:
            del sys.modules[name]
        sys.path.insert(0, str(directory))
    report = run_scenario(rank, scenario)
    loaded_from = sys.modules["minddp"].__file__
    assert loaded_from is not None
    assert Path(loaded_from).is_relative_to(directory), f"minddp was imported from {loaded_from}"
    return report
