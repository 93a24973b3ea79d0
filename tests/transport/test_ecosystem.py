"""FSDP, pipelines, checkpoints and more give the same bits over minddp's backend as over gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.transport.ecosystem import CASES

LIMIT_S = 240


def digests(backend: str) -> dict[str, list[str]]:
    """Of each case, those of the ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "-m", "tests.transport.ecosystem", backend]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: found for name, *found in map(str.split, ended.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 30)
def test_all_have_gloos_bits() -> None:
    over_gloo = digests("gloo")
    assert list(over_gloo) == [case.__name__ for case in CASES]
    assert digests("minddp") == over_gloo
