"""Communication hooks: the contract of a hook, and three that torch does not have. See docs/hooks.md.

    registered.py       what a hook is given, and what it must give back; torch's own plug in unchanged
    bf16_wire.py        bfloat16 on the wire, sums in float32
    int8_wire.py        8 bits on the wire, sums in float32; what rounding loses is sent in the next step
    adasum.py           another sum: gradients that point the same way are averaged, orthogonal ones are added

    exchange.py         the messages of these three: a scatter, a sum by its owner, a gather
    shards.py           which rank sums which numbers: by parameter, so that buckets do not matter
    error_feedback.py   what has not been sent, for each parameter

The three need nothing but torch's `GradBucket`, so they run with torch's own `DistributedDataParallel`, too.
"""

from minddp.comm_hooks.adasum import adasum_hook
from minddp.comm_hooks.bf16_wire import bf16_wire_hook
from minddp.comm_hooks.error_feedback import ErrorFeedback
from minddp.comm_hooks.exchange import Exchange
from minddp.comm_hooks.int8_wire import int8_wire_hook
from minddp.comm_hooks.registered import CommHook, GradBucket, HookReducing

HOOKS = {
    "bf16_wire": (Exchange, bf16_wire_hook),
    "int8_wire": (ErrorFeedback, int8_wire_hook),
    "adasum": (Exchange, adasum_hook),
}
__all__ = ["HOOKS", "CommHook", "ErrorFeedback", "GradBucket", "HookReducing"]
