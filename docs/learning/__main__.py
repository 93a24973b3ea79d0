"""`python -m docs.learning [NAME]`: show a lesson, or renew what the pages quote. See `__init__.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from docs.learning import pages, recorded
from docs.learning.lessons import LESSONS, listing, run


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case []:
            print(listing())
        case ["fill"]:
            pages.fill()
        case ["record"]:
            recorded.record()
            recorded.results.cache_clear()
            pages.fill()
        case [name] if name in LESSONS:
            print(run(LESSONS[name]))
        case _:
            raise SystemExit(f"There is no lesson `{' '.join(arguments)}`. Without a name, all of them are listed.")


if __name__ == "__main__":
    main(sys.argv[1:])
