"""Small faults put into a copy of minddp, to see whether the comparison with torch notices them.

A `Mutation` replaces one piece of source text. The text must occur exactly once in its file: when the core has
moved on, a mutation that no longer applies fails loudly instead of testing nothing. Each comes with a scenario
that should tell the faulty copy from torch.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.parity.runner import Report, run_scenario
from tests.parity.scenario import (
    Accumulate,
    Layer,
    Model,
    Optimize,
    Options,
    Scenario,
    Train,
    ZeroGrad,
)


class StaleMutation(AssertionError):
    """The text that a mutation replaces is not in the source, or not only once."""


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in minddp/`file`; then `scenario` reports what the pattern `shows` matches."""

    name: str
    file: str
    old: str
    new: str
    scenario: Scenario
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
        assert "minddp" not in sys.modules, "the rank has imported minddp before; it must be a fresh one"
        sys.path.insert(0, str(directory))
    report = run_scenario(rank, scenario)
    loaded_from = sys.modules["minddp"].__file__
    assert loaded_from is not None
    assert Path(loaded_from).is_relative_to(directory), f"minddp was imported from {loaded_from}"
    return report


_PLAIN = Model((Layer("linear"), Layer("batch_norm"), Layer("linear")), reversed_use=True)
_BRANCHING = Model((Layer("branch_rank"), Layer("linear")))
_MANY_BUCKETS = Options(bucket_cap_mb=0.01)
_TWO_STEPS = (Train(), Optimize(), Train(), Optimize(), Train())

_TRAINING = Scenario(3, _PLAIN, _MANY_BUCKETS, script=_TWO_STEPS)
_FINDING = Scenario(
    3,
    _BRANCHING,
    Options(bucket_cap_mb=0.01, find_unused_parameters=True),
    script=(Train(), Optimize(), ZeroGrad(), Train(), Optimize(), Train()),
)
_NOTING = Scenario(
    2,
    Model((Layer("linear"), Layer("linear"))),
    Options(bucket_cap_mb=0.01, find_unused_parameters=True),
    hook="take_notes",
    script=(Train(), Train()),
)
_ACCUMULATING = Scenario(2, _PLAIN, script=(Accumulate(), Train(), Optimize(), Accumulate(batches=2), Train()))

MUTATIONS = (
    Mutation(
        "skip the division",
        "core/reducer.py",
        "divisor = self.divisor.for_this_backward() if self.comm_hook is None else None",
        "divisor = None",
        _TRAINING,
    ),
    Mutation(
        "divide although a hook owns the arithmetic",
        "core/reducer.py",
        "divisor = self.divisor.for_this_backward() if self.comm_hook is None else None",
        "divisor = self.divisor.for_this_backward()",
        Scenario(2, _PLAIN, hook="sum_times_third", script=(Train(),)),
    ),
    Mutation(
        "divide truly instead of multiplying by the inverse",
        "core/reducer.py",
        "divide_copied=batched,",
        "divide_copied=True,",
        _TRAINING,
    ),
    Mutation(
        "launch in the order of readiness",
        "core/reducer.py",
        """\
        while not current.is_complete and current.runs_left[len(current.reductions)] == 0:
            bucket = self.buckets[len(current.reductions)]
""",
        """\
        unlaunched = self.buckets[len(current.reductions) :]
        for bucket in [bucket for bucket in unlaunched if current.runs_left[bucket.spec.index] == 0]:
            self.buckets.remove(bucket)
            self.buckets.insert(len(current.reductions), bucket)
""",
        _FINDING,
        shows=r"died with exit code|gave no answer in time|gradient of .* differs|rank 0 has .* elements",
    ),
    Mutation(
        "forget the rebuild",
        "core/reducer.py",
        "if observed is None:",
        "if True:",
        _TRAINING,
    ),
    Mutation(
        "keep the last bucket's result",
        "core/reducer.py",
        "            if reduction is not None:\n                average",
        "            if reduction is not None and bucket is not self.buckets[-1]:\n                average",
        _TRAINING,
    ),
    Mutation(
        "broadcast from rank 1",
        "ddp.py",
        "def synchronize(self, source: int = 0,",
        "def synchronize(self, source: int = 1,",
        _TRAINING,
        shows=r"construction: parameter .* differs",
    ),
    Mutation(
        "forget to copy averages back",
        "core/bucket.py",
        "        self._copy_back(wanted, averages)\n",
        "",
        _TRAINING,
    ),
    Mutation(
        "launch the first layers first",
        "core/plan.py",
        "return _plan(specs, reversed(groups),",
        "return _plan(specs, groups,",
        _NOTING,
        shows="the hook was shown other buckets",
    ),
    Mutation(
        "let slots overlap by one element",
        "core/plan.py",
        "slots.append(Slot(param, index, offset, specs[param].numel))",
        "slots.append(Slot(param, index, max(offset - 1, 0), specs[param].numel))",
        _TRAINING,
    ),
    Mutation(
        "synchronise under no_sync",
        "ddp.py",
        "self.require_backward_grad_sync = False",
        "self.require_backward_grad_sync = True",
        _ACCUMULATING,
    ),
    Mutation(
        "forget which parameters were used",
        "core/reducer.py",
        "self._usage.mark(param)",
        "pass",
        _FINDING,
    ),
    Mutation(
        "take unused on this rank for unused on all",
        "expectation/usage_map.py",
        "[total == 0 for total in self.sums.tolist()]",
        "[mark == 0 for mark in self._marks]",
        _FINDING,
        shows=r"gradient of .* should be float32.*, is None",
    ),
    Mutation(
        "forget to broadcast buffers",
        "ddp.py",
        "        if self._synchronizes_buffers(after_forward=False):\n",
        "        if False:\n",
        _TRAINING,
        shows=r"buffer .*running_mean` differs",
    ),
)
