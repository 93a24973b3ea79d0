"""The function that docs/guard.md calls for its outputs. Cog fills them in:

python -m cogapp -r -P docs/guard.md
"""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool
from tests.tools.watchdog.drifting import findings

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "guard.md"


def reported(name: str) -> None:
    """What rank 0 reports in a scenario of `tests/tools/watchdog/drifting.py`."""
    pool = RankPool(3)
    try:
        (text,), *_ = pool.run(findings, name)
    finally:
        pool.kill()
    print(f"```text\n{text}\n```")
