"""Communication hooks: torch's own plug in unchanged; `GradBucket` is what they are shown."""

from minddp.comm_hooks.interface import CommHook, GradBucket, HookReducing

__all__ = ["CommHook", "GradBucket", "HookReducing"]
