"""The machine: cores, hosts, clocks, streams, processes, and the store of the ranks."""
