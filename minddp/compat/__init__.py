"""Being taken for torch's class, by frameworks and by scripts that know nothing of minddp.

`install` makes `isinstance` hold and puts minddp where torch's class was, `run` does so for a whole job that it
launches, `execute` for any command, both by the folder `startup`; with `on_cpu` for scripts that ask for CUDA.
"""
