"""The algorithm of data parallelism, complete without the rest of the package. Begin with `reducer.py`."""
