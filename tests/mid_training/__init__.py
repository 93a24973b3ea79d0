"""Random training scripts that change what they do in mid-training, with torch's DDP as the control.

A script begins with calm steps, so that buckets are rebuilt and every optimisation is in use. Then it makes a few
changes (a layer is reused, a gradient is replaced, a backward fails, ...), each followed by ordinary steps. Both
wrappers play it side by side; [Note: the verdict] in `verdict.py` says what must hold after each line.

    script.py     what a script is, and how it prints
    network.py    the model, whose layers may be taken in another order, twice or not at all
    side.py       one copy of the model in its wrapper
    changes/      what the lines of a script do
    generate.py   a script from a seed
    verdict.py    plays a script on one rank and judges each line
    search.py     plays scripts on a pool of ranks, and shrinks those that fail

    python -m tests.mid_training --seed 1000 --count 2000
"""
