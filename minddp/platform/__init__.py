"""Facts about the machine, each written once: cores, hosts, streams, starting ranks."""
