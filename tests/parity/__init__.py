"""The comparison with torch: random training scripts, played with torch's wrapper and with minddp's side by side.

A script is plain data: a model, options of the wrapper, and lines (a step, a layer that is reused, a gradient that
is replaced, a backward that fails, a communication hook, ...). On each rank three copies of one model play it line
by line: in torch's wrapper, in minddp's, and unwrapped, as the control. After each line all bits are compared; a
difference is reported with its line, rank and parameter. [Note: the verdict] in `verdict.py` is the oracle.

Some scripts are careful: any layers, options and hooks, in lines that torch completes. The others begin with calm
steps, so that buckets are rebuilt and every optimisation is in use, and then change their ways.

    script.py     what a script is, and how it prints
    layers.py     the layers of a model
    network.py    the model, whose layers may be taken in another order, twice or not at all
    hooks.py      communication hooks
    side.py       one copy of the model in its wrapper
    changes/      what the lines of a script do
    arguments.py  how the arguments of lines are drawn
    careful.py    a careful script from a seed
    generate.py   a script from a seed
    compare.py    where two tensors, or two copies of a model, differ
    verdict.py    plays a script on one rank and judges each line
    search.py     plays scripts on a pool of ranks
    faults.py     wrappers with a fault, which must be noticed

    python -m tests.parity --seed 1000 --count 2000

Scripts that are functions instead of data are in `tests/features`: `beside.py` there plays one with each wrapper,
and compares with `compare.py`.
"""
