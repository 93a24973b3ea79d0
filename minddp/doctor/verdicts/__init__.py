"""Pure functions from facts to findings, one file for each thing that the facts are about."""
