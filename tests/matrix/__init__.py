"""Runs the core of the suite with other versions of torch and Python: `python -m tests.matrix`, `make matrix`."""
