"""Tests that need an NVIDIA GPU. `make gpu` runs all of them; docs/gpu.md lists the purpose of each part.

With `MINDDP_GPU_REHEARSAL=1` the tests run on the CPU over gloo, as far as they need no GPU itself. That rehearses
their own code, so that time on a GPU is not lost to a misspelt name.
"""
