"""The public names of `tools/elastic/`; `python -m minddp.elastic` is the command `minddp elastic`."""

import sys

from minddp.tools.elastic.launcher import main
from minddp.tools.elastic.session import RankLost, Session, Step, join
from minddp.tools.elastic.share_data import ShareLoader

__all__ = ["RankLost", "Session", "ShareLoader", "Step", "join"]

if __name__ == "__main__":
    sys.exit(main())
