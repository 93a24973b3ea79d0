"""`python -m docs.learning [NAME]`: show a lesson, or renew what the pages quote. See `__init__.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from docs.learning import quotes, recorded
from docs.learning.lessons import LESSONS, listing, run


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case []:
            print(listing())
        case ["fill"]:
            return quotes.fill()
        case ["record"]:
            recorded.record()
            return quotes.fill()
        case [name] if name in LESSONS:
            print(run(LESSONS[name]))
        case _:
            raise SystemExit(f"There is no lesson `{' '.join(arguments)}`. Without a name, all of them are listed.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
