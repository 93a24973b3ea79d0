"""The function that docs/watch.md calls for its tables. Cog fills them in:

python -m cogapp -r -P docs/watch.md
"""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool
from tests.tools.watchdog.bugs import BUGS, WAITS
from tests.tools.watchdog.test_watch import said_of, said_of_a_wait

PAGE = Path(__file__).parents[3] / "docs" / "watch.md"


def found() -> None:
    """What rank 0 says of each bug, and how many seconds after its first step."""
    pool = RankPool(2)
    try:
        said, seconds = pool.run(said_of, [*BUGS], "bugs")[0]
    finally:
        pool.kill()
    print("| bug | after | warning |\n|---|--:|---|")
    for name, (function, _) in BUGS.items():
        print(f"| {title_of(name, function.__doc__)} | {seconds[name]:.1f} s | {said[name][0]} |")


def explained() -> None:
    """The first line that is said of each wait, with the default `stuck_after_s`."""
    print("| wait | after | first line of the diagnosis |\n|---|--:|---|")
    for name, (function, _) in WAITS.items():
        pool = RankPool(2, group_timeout_s=30.0, grace_s=40.0)
        try:
            texts, seconds = zip(*pool.run(said_of_a_wait, name, 7.0, 4.0), strict=True)
        finally:
            pool.kill()
        first = next(of_rank[0] for of_rank in texts if of_rank).splitlines()[0]
        print(f"| {title_of(name, function.__doc__)} | {max(seconds):.1f} s | {first} |")


def title_of(name: str, description: str | None) -> str:
    return f"`{name}`" + (f": {description[0].lower()}{description[1:].rstrip('.')}" if description else "")
