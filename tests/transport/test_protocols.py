"""The protocols are importable without the adapters behind them."""

from __future__ import annotations

import subprocess
import sys


def test_no_adapter_is_imported_before_a_transport_is_opened() -> None:
    program = """
import sys, minddp.transport.protocols
loaded = {name for name in sys.modules if name.startswith("minddp.transport.")}
assert loaded == {"minddp.transport.protocols"}, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
