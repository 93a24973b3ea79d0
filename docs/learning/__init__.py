"""Lessons: short programs, each of which shows one thing that the pages in this folder tell.

    python -m docs.learning              # what there is to be shown
    python -m docs.learning plan         # show one of them
    python -m docs.learning fill         # renew whatever the pages quote: outputs, code, figures
    python -m docs.learning record       # record new steps and draw new pictures of them, then fill

| file | what it shows |
|---|---|
| `small_net.py` | the model that all lessons train |
| `life.py` | one gradient's way through minddp |
| `ladder.py` | what each rung of `reference/` does, and when |
| `traps.py` | what goes wrong if a mechanism is left out |
| `bits.py` | where the last bits of a gradient come from |
| `recorded.py` | recorded steps: made, kept, read, and what they have to show to be worth a page |
| `pages.py` | what a page quotes, and whether that is still true |

A lesson is a function that returns what it has to show. Most run on two ranks and return rank 0's view. What does
not depend on the clock is the same in every run, and a test compares it with the page; what does depend on it is
read from recordings that lie in `recorded/`.
"""
