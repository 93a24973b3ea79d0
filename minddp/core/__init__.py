"""The algorithm of data parallelism, complete but for the transports. Begin with `reducer.py`."""
