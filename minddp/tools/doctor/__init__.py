"""`minddp doctor`: check in seconds, before a job, whether a distributed job will work here.

The ranks meet at the store, exchange fact sheets, connect, and measure (`doctor_command.py`). The pure functions of
`verdicts.py` judge facts and measurements.
"""
