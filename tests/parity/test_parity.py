"""A random search for a training script in which minddp and torch differ in one bit.

`make test` plays scripts 0 to 149, `make check` 350 more. `make fuzz` plays others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.parity.changes import CHANGES
from tests.parity.changes.routes import REUSES
from tests.parity.generate import script_from
from tests.parity.hooks import HOOKS
from tests.parity.layers import DTYPES, FROZEN, LAYERS
from tests.parity.script import TRANSPORTS, Options, Script
from tests.parity.search import Search
from tests.ranks import RankPool

SCRIPTS, BATCH = 500, 25
FAST = 150  # scripts in `make test`; the others are as random


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[] if n < FAST else [pytest.mark.slow]) for n in range(0, SCRIPTS, BATCH)],
)
def test_minddp_does_as_torch_does(first: int, pools: Callable[[int], RankPool]) -> None:
    search = Search(pools)
    for seed in range(first, first + BATCH):
        search.from_seed(seed)
    assert not search.failures, str(search)
    assert search.notes.total() < 0.6 * BATCH, f"too many scripts meet with an error\n{search}"


def test_the_scripts_cover_all_changes_and_options() -> None:
    scripts = [script_from(seed) for seed in range(SCRIPTS)]
    changes = Counter(line.name for script in scripts for line in script.lines)
    assert changes.keys() == CHANGES.keys()
    assert min(changes.values()) >= 5
    assert {line.args[1] for script in scripts for line in script.lines if line.name == "reuse"} == set(REUSES)
    assert {script.world_size for script in scripts} == {2, 3, 4}
    assert {script.transport for script in scripts} == set(TRANSPORTS)
    assert {script.accelerated for script in scripts} == {True, False}
    for option in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        assert sum(getattr(script.options, option) for script in scripts) > SCRIPTS / 10
    assert {name for script in scripts for name in script.options.chosen()} == set(Options.offered())
    layers = Counter(part for script in scripts for layer in script.layers for part in layer.split(":"))
    assert layers.keys() == {*LAYERS, *DTYPES, *FROZEN}
    assert min(layers.values()) >= 5
    lines = {(line.name, arg) for script in scripts for line in script.lines for arg in line.args}
    assert {arg for name, arg in lines if name == "comm_hook"} == set(HOOKS)
    assert {arg for name, arg in lines if name == "output_as"} > {"tensor", "tuple", "dict", "dataclass"}
    assert sum(script.calm_steps >= 4 for script in scripts) > SCRIPTS / 4


def test_a_printed_script_is_the_expression_that_makes_it() -> None:
    for seed in range(200):
        assert Script.parsed(repr(script_from(seed))) == script_from(seed)
