"""Replicas start equal and stay equal: checks at construction, broadcasts, buffers."""
