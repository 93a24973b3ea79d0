"""How replicas start equal and stay equal: checks before wrapping, broadcasts, buffers."""
