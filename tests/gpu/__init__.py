"""What can only be seen on an NVIDIA GPU. `make gpu` runs all of it; docs/gpu.md says what each part is for.

With `MINDDP_GPU_REHEARSAL=1` the tests run on the CPU over gloo, as far as they need no GPU itself: their own code
is rehearsed then, so that time on a card is not lost to a misspelt name.
"""
