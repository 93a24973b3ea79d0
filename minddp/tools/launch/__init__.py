"""Run scripts that do not mention minddp: `run` launches ranks, `execute` runs any command.

Both put the folder `startup` on PYTHONPATH, which installs minddp in each process. `on_cpu` replaces CUDA.
"""
