"""Random training scripts, run on torch's DDP and on minddp side by side, and compared bit for bit.

`scenario.py` says what a scenario is, `strategies.py` draws them, `models.py` and `hooks.py` build what they
name, `steps.py` performs one step of a script, `compare.py` looks for differing bits, `runner.py` plays a
whole scenario on one rank, `replay.py` on all, `census.py` counts what the search has covered.
"""
