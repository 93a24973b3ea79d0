"""`minddp doctor`: check in seconds, before a job, whether a distributed job will work here.

The ranks meet at the store, exchange fact sheets, connect, and measure: see `Examination`. Pure functions judge
facts and measurements: `rank_verdicts.py`, `network_verdicts.py`.
"""
