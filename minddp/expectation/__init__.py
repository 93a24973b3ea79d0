"""Which gradients a backward will bring, beyond "all of them": unused parameters and static graphs."""
