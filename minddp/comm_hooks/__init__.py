"""Communication hooks: the contract of a hook, and two hooks that torch does not have. See docs/hooks.md.

The two use only torch's `GradBucket`, so they also run with torch's own `DistributedDataParallel`.
"""

from minddp.comm_hooks.bf16_compression import bf16_compression_hook
from minddp.comm_hooks.error_feedback import ErrorFeedback
from minddp.comm_hooks.hook_collectives import HookCollectives
from minddp.comm_hooks.int8_compression import int8_compression_hook
from minddp.comm_hooks.registered import CommHook, GradBucket, HookStrategy

HOOKS = {
    "bf16_wire": (HookCollectives, bf16_compression_hook),
    "int8_wire": (ErrorFeedback, int8_compression_hook),
}
__all__ = ["HOOKS", "CommHook", "ErrorFeedback", "GradBucket", "HookStrategy"]
