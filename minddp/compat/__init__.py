"""Being taken for torch's class, by frameworks and by scripts that know nothing of minddp.

`recognition` makes `isinstance` hold, `install` puts minddp where torch's class was, `run` does so for a whole
job that it launches, `execute` for any command. `environment` and the folder `startup` are how the two do it.
"""
