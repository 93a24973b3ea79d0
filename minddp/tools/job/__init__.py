"""The job of a rank, for several tools: its processes on this machine."""
