"""The upper storey: tools that stand on the wrapper, and the wrapper with its tools attached, `wrapper.py`."""
