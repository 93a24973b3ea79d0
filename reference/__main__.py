"""`python -m reference`: all rungs side by side. See `ladder.py`."""

import tyro

from .ladder import main

if __name__ == "__main__":
    tyro.cli(main)
