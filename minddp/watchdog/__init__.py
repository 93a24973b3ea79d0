"""A wait for other ranks that takes too long ends in a diagnosis.

A data-parallel job stops when one rank does not join a collective that the others are in. They wait in silence
until a time limit ends them, often half an hour later. All ranks together know the reason, and the store through
which they connected still works while collectives do not.

| question | file |
|---|---|
| where is a rank now? | `rank_state.py` |
| how do ranks exchange their states while they are stuck? | `inquiry.py` |
| what has happened, given all states? | `diagnosis.py` |
| which waits are watched, and what happens when one takes too long? | `watched_transport.py` |
"""

from minddp.watchdog.rank_state import Progress, progress_of
from minddp.watchdog.watched_transport import Stuck, WatchedTransport, watched

__all__ = ["Progress", "Stuck", "WatchedTransport", "progress_of", "watched"]
