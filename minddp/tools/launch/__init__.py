"""Scripts that know nothing of minddp: `run` launches them, `execute` runs any command with minddp installed.

Both do so by the folder `startup`; with `on_cpu` for scripts that ask for CUDA.
"""
