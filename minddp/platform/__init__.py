"""The machine: cores, hosts, streams, processes, and the store of the ranks."""
