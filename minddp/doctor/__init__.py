"""`minddp doctor`: will a distributed job work here? Checked in seconds, before the job.

    minddp doctor --nproc-per-node 2
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 --nproc-per-node 8 -m minddp doctor

The ranks meet, tell each other through the store what they are and where, connect, and measure. What is found is
judged by pure functions, facts in and findings out; whatever could wait for ever is waited for from outside.

| question | file |
|---|---|
| what is checked, in which order? | `examination.py` |
| what can be found, and how bad is it? | `findings.py` |
| given the facts, what is found? | `verdicts/` |
| which facts does a rank tell of itself? | `facts.py`; collected by `survey.py`, `interfaces.py` |
| which rank am I, and where do we meet? | `place.py`, `meeting.py` |
| how do ranks that cannot reach each other talk? | `board.py` |
| how does a wait end that has no end? | `patience.py` |
| who can open a connection to whom? | `reach.py` |
| how fast is it? | `measure.py`; the arithmetic: `fit.py` |
| what does a person see? | `report.py`, `progress.py` |
| who starts the ranks? | `command.py` |
"""
