"""Is a fault in minddp noticed? Faults are made by operators on the syntax tree, and run under the unit tests.

`python -m tests.mutants core` makes every fault of minddp/core and lists those that no test notices. `make check`
runs a seeded sample.
"""
