"""What the launcher does for the store that it holds; tests/tools/elastic/test_survival.py starts real ones."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from minddp.tools.elastic.launcher import main


@pytest.mark.parametrize(("options", "asks"), [([], False), (["--join", "--store", "there:1"], True)])
def test_the_stores_server_asks_no_name_server(
    monkeypatch: pytest.MonkeyPatch, options: list[str], asks: bool
) -> None:
    """All ranks wait while it does; a launcher that joins has to find the store by its name."""
    found: list[str | None] = []

    class Store:
        port = 1

        def __init__(self, *_: Any, **__: Any) -> None:
            found.append(os.environ.get("RES_OPTIONS"))

        def check(self, _keys: list[str]) -> bool:
            return True

    monkeypatch.setenv("RES_OPTIONS", "timeout:2")
    monkeypatch.setattr(dist, "TCPStore", Store)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main([*options, "--nproc", "0", "script.py"]) == 0
    assert found == ["timeout:2" if asks else "attempts:0"]
