"""Communication hooks: torch's own plug in unchanged; `GradBucket` is what they are shown."""

from minddp.comm_hooks.interface import CommHook, GradBucket

__all__ = ["CommHook", "GradBucket"]
