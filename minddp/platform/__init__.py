"""Facts about the machine, each written once: cores, hosts, CuPy beside torch, starting ranks."""
