"""Being taken for torch's class by frameworks: its private surface, and `install`, which puts minddp in its place."""
