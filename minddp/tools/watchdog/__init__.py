"""A wait for other ranks that takes too long ends in a diagnosis. And what goes wrong without an error is noticed.

A job stops when one rank does not join a collective: the others wait in silence until a time limit, often half an
hour later. All ranks together know the reason, and the store through which they connected still works.

| question | file |
|---|---|
| which waits are watched, and what happens when one takes too long? | `watched_transport.py` |
| where is each rank, and what has happened? | `rank_state.py`, exchanged by `inquiry.py`; `diagnosis.py` |
| what if the ranks do not even meet in `init_process_group`? | `meeting.py` |
| what is looked at while nothing stops, and when? | `guard.py`, which calls each `check.py` |
| are the replicas still equal? If not, why? | `drift.py`, by `fingerprint.py` |
| is the wrapper used at all, and does each rank have data of its own? | `misuse.py` |
| which rank is late, so that the others wait? | `slow_rank.py` |
| how do notes travel, and findings back? | `exchange.py`, by `board.py` |
"""

from minddp.tools.watchdog.rank_state import RankState, state_of
from minddp.tools.watchdog.watched_transport import Stuck, WatchedTransport, watched

__all__ = ["RankState", "Stuck", "WatchedTransport", "state_of", "watched"]
