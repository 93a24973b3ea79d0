"""Why is it stuck? Every wait for other ranks has an eye on it, and says what the others are doing.

A data-parallel job stops when one rank does not come to a collective that the others are in. They wait, say
nothing, and after half an hour some time limit kills them. The ranks know better, all of them together, and the
store that they met through still works while collectives do not.

| question | file |
|---|---|
| what does a rank say of itself? | `state.py` |
| how do the ranks hear from each other while they are stuck? | `lookout.py` |
| what has happened, given what all of them say? | `diagnosis.py` |
| who notices that it takes too long? | `watched.py` |
"""

from minddp.watchdog.diagnosis import Answers, Diagnosis, diagnose
from minddp.watchdog.inquiry import Lookout
from minddp.watchdog.rank_state import Collective, Progress, RankState, progress_of
from minddp.watchdog.watched_transport import Stuck, WatchedTransport, watched

__all__ = [
    "Answers",
    "Collective",
    "Diagnosis",
    "Lookout",
    "Progress",
    "RankState",
    "Stuck",
    "WatchedTransport",
    "diagnose",
    "progress_of",
    "watched",
]
