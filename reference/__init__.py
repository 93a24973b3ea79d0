"""Data parallelism from the ground up, to be read before minddp. It needs PyTorch, and no knowledge of DDP.

Read in this order:

1. `oracle.py`       what the gradient must be, computed by one process
2. `interface.py`    what all rungs of DDP share, and the two traps of gradient hooks
   `wire.py`         the kinds of messages between ranks, with a log
3. `naive.py`        after backward, average the gradients one by one
4. `flat.py`         ... in one message
5. `overlapped.py`   ... while backward is still going on
6. `bucketed.py`     ... in a few messages planned beforehand: DDP at heart
7. `automatic.py`    ... with no call to remember: a drop-in
8. `data_parallel.py`  below the ladder: one process with a replica on each device
   `sharding.py`     above it, when a model does not fit: what the next three share
   `zero1.py`        a rank keeps its part of the optimizer's state
   `zero2.py`        ... and of the gradients
   `zero3.py`        ... and of the parameters: FSDP at heart
9. `ring.py`         what goes on inside one all-reduce
   `collectives.py`  the other ways to do it, step by step: `python -m reference.collectives`

`python -m reference` runs all rungs side by side and compares them with the oracle (`ladder.py`).
`python -m reference.exercises DIR` writes them without their bodies; `python -m reference.grade FILE:CLASS` grades
your own class (`checks.py` asks, `comparison.py` names what is wrong, `ranks.py` notices a hang).
docs/learning/ladder.md has pictures.

Nothing here imports minddp and nothing there imports this, so that each can be the test of the other.
"""
