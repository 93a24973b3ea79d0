"""A wait for other ranks that takes too long ends in a diagnosis, and silent problems of training are reported.

A job stops when one rank does not join a collective: the others wait in silence until a time limit, often half an
hour later. All ranks together know the reason, and the store through which they connected still works.

| question | file |
|---|---|
| which waits are watched, and what happens when one takes too long? | `watched_transport.py` |
| where is each rank? | `rank_state.py`; the ranks exchange their states by `inquiry.py` |
| why do the ranks not go on? | `diagnosis.py` |
| which steps of a running training are checked, and by which interface? | `check.py`; `guard.py` calls the checks |
| are the replicas still equal? If not, why? | `drift.py`, by `fingerprint.py` |
| is the wrapper bypassed, has each rank its own data, and each epoch another order? | `misuse.py` |
| which rank is late, so that the others wait? | `slow_rank.py` |
| does an optimizer step with NaN? | `finite.py`, which has `check_finite`, too |
| how do notes reach rank 0, and findings all ranks? | `comparison.py` |
| how are other classes watched? | `watch.py`: guards by `observer.py`, waits by `process_monitor.py` |
"""

from minddp.tools.watchdog.rank_state import RankState
from minddp.tools.watchdog.watched_transport import Stuck, WatchedTransport

__all__ = ["RankState", "Stuck", "WatchedTransport"]
