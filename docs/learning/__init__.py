"""Lessons: short programs that show, one by one, what the pages in this folder explain.

    python -m docs.learning              # list the lessons
    python -m docs.learning plan         # show one of them
    python -m docs.learning fill         # renew what the pages quote: outputs, code, figures
    python -m docs.learning record       # record new steps, draw their pictures, then fill

| file | what it shows |
|---|---|
| `small_net.py` | the model that all lessons train |
| `life.py` | one gradient's way through minddp |
| `ladder.py` | what each rung of `reference/` does, and when |
| `above.py` | what the rungs below and above DDP hold and send |
| `collectives.py` | when which all-reduce is the fastest |
| `traps.py` | what goes wrong if a mechanism is left out |
| `bits.py` | where the last bits of a gradient come from |
| `explore/` | the page to try things out, `explore.html` |
| `own_run.py` | the same page for a backward of your own; `own_values.py` runs its ranks |
| `provenance.py` | gradients that record where they come from: proofs, and the classic bugs |
| `recorded.py` | recorded steps: made, kept, read, and compared with the claims of the pages |
| `quotes.py` | what the pages quote, filled in by cog |

A lesson is a function that returns its output. Most run on two ranks and return rank 0's view. Outputs do not
depend on the clock, and a test compares them with the pages; times are read from the recordings in `recorded/`.
"""
