"""Data parallelism from the ground up, to be read before minddp. It needs PyTorch, and no knowledge of DDP.

Read in this order:

1. `oracle.py`       what the gradient must be, computed by one process
2. `interface.py`    what all rungs share, and the two traps of gradient hooks
   `wire.py`         the two kinds of messages between ranks, with a log
3. `naive.py`        after backward, average the gradients one by one
4. `flat.py`         ... in one message
5. `overlapped.py`   ... while backward is still going on
6. `bucketed.py`     ... in a few messages planned beforehand: DDP at heart
7. `automatic.py`    ... with no call to remember: a drop-in
8. `ring.py`         what goes on inside one all-reduce
9. `provenance.py`   gradients that record where they come from: proofs, and the classic bugs

docs/learning/ladder.md goes through the rungs: what each sends and when, with pictures of recorded steps.
`python -m reference` runs every rung on two ranks and compares it with the oracle (`ladder.py` does
the measuring); `python -m reference.ring` and `python -m reference.provenance` show the last two.

Nothing here imports minddp and nothing there imports this, so that each can be the test of the other.
"""
