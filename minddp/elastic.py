"""The public names of `tools/elastic/`."""

from minddp.tools.elastic.session import RankLost, Session, Step, join
from minddp.tools.elastic.share_data import ShareLoader

__all__ = ["RankLost", "Session", "ShareLoader", "Step", "join"]
