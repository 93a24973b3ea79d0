"""Fixtures: pools of real ranks that live for the whole run. Hooks: tiers, temporary files, options torch lacks.

[Note: tiers]
A test is in the slow tier if its file is in `SLOW`, or if it is marked `slow`. `make test` leaves that tier out and
does not even import those files, since the frameworks take seconds. `make check` runs both tiers.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.ranks import RankFailure, RankPool, take_findings
from tests.temporary_files import PREFIX, TemporaryFiles

# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Files and folders of the slow tier. See [Note: tiers].
SLOW = [
    Path(__file__).parent / name
    for name in (
        "benchmarks",
        "compat/test_accelerate.py",
        "compat/test_checkpoint.py",
        "tools/launch/test_execute.py",
        "compat/test_lightning.py",
        "compat/test_pipelining.py",
        "compat/test_shipped.py",
        "compat/test_transformers.py",
        "compat/test_zero.py",
        "conformance",
        "tools/doctor/test_doctor_command.py",
        "tools/elastic/test_dropped_group.py",
        "tools/elastic/test_survival.py",
        "features/test_scripts.py",
        "parity/test_faults.py",
        "surface/test_compile.py",
        "tools/train/test_cluster.py",
        "test_demo.py",
        "tools/train/test_launch.py",
        "tools/train/test_trainer.py",
        "transport/test_hierarchical_hosts.py",
        "tools/watchdog/test_stuck.py",
        "tools/xray/test_browser.py",
        "tools/xray/test_window.py",
    )
]

# These come first, the longest before the others, so that no worker ends with a long one alone: in the slow tier
# workers take files as wholes.
LONGEST = [
    Path(__file__).parent / name
    for name in (
        "parity/test_parity.py",
        "features/test_scripts.py",
        "tools/elastic/test_survival.py",
        "tools/launch/test_on_cpu.py",
        "tools/train/test_launch.py",
        "conformance/test_core.py",
        "tools/elastic/test_survival_breaks.py",
        "parity/test_faults.py",
        "tools/train/test_cluster.py",
        "compat/test_lightning.py",
        "compat/test_transformers.py",
        "tools/xray/test_browser.py",
        "tools/train/test_trainer.py",
        "reference/test_grade.py",
        "surface/test_compile.py",
        "simulated_device/test_modes.py",
        "compat/test_shipped.py",
        "conformance/test_running.py",
        "tools/watchdog/test_stuck.py",
        "tools/doctor/test_doctor_command.py",
    )
]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the session's pool of n gloo ranks."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    pool_of.pools = pools  # type: ignore[attr-defined]
    yield pool_of
    for pool in pools.values():
        pool.kill()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Skip a test where the installed torch's class does not have the option that it compares.

    With MINDDP_NO_FINDINGS=1 a finding of the guard is a failure: a search for false alarms.
    """
    try:
        result = yield
        if "MINDDP_NO_FINDINGS" in os.environ and (pool_of := getattr(item, "funcargs", {}).get("ranks")):
            found = [text for pool in pool_of.pools.values() for texts in pool.run(take_findings) for text in texts]
            assert found == [], "the guard has found something in a script that should be calm"
        return result
    except RankFailure as failure:
        unknown = re.search(
            r"DistributedDataParallel\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(failure)
        )
        if unknown is not None and unknown[1] not in inspect.signature(TorchDDP).parameters:
            pytest.skip(f"the installed torch has no `{unknown[1]}`")
        raise


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist, and runs that tests start, share the folder of the run above them.
    if not Path(tempfile.gettempdir()).name.startswith(PREFIX):
        config.pluginmanager.register(TemporaryFiles())


def is_slow(path: Path) -> bool:
    return any(path.is_relative_to(slow) for slow in SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


def pytest_collection_finish() -> None:
    """Garbage collections, which many tests ask for, leave out what has been imported: half a second's work."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")
    # A test with a time limit of its own is long: it begins early, so that no worker ends with it alone.
    place = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path, len(place)), item.get_closest_marker("timeout") is None))
