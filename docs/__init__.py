"""Pages to read, and the programs behind those that show what programs print."""
