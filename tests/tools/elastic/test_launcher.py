"""The launcher and the store that it holds; tests/tools/elastic/test_survival.py starts one for a training."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from minddp.tools.elastic import launcher


def test_the_store_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks would wait while it does."""
    found: list[str | None] = []

    def make(*_: object, **__: object) -> dist.Store:
        found.append(os.environ.get("RES_OPTIONS"))
        return store

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist, "TCPStore", make)
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: 0)
    monkeypatch.setenv("RES_OPTIONS", "timeout:2")
    assert launcher.main(["script.py"]) == 1
    assert found == ["attempts:0"]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--nproc", "0", "script.py"], "--nproc of 1 or more"), ([], "Name a script")]
)
def test_mistakes_are_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launcher.main(arguments)
    assert message in capsys.readouterr().err
