r"""All-reduces by NCCL itself, called through CuPy: the work of a process group, in readable Python.

All ranks join by rank 0's *unique id* of 128 bytes (`share_unique_id`); then they make the same calls in one order.

NCCL's calls only enqueue: the kernel that adds runs later, on the stream that was passed. Backward must not wait
for it, so the communicator has a stream of its own, and events enforce the order:

    backward's stream   pack bucket 0 ──┐ready    pack bucket 1 ──┐              ┌─ unpack
                                        │                         │              │
    the communicator's                  └─> all-reduce 0 ─────────└> all-reduce 1┘done

    1. `ready` is recorded behind the caller's operations; the communicator's stream waits for it
    2. the collective is enqueued there, and `done` is recorded behind it
    3. `work.wait()` makes the calling stream wait for `done`

The host never waits. So a tensor may be dropped before the device has reached it: `Tensor.record_stream` makes the
caching allocator keep its memory until this stream has passed, also for buckets that are dropped with a collective
in flight.

When a rank dies, the kernels of the others spin forever, and with them the stream that waits for `done`, and the
host as soon as it reads a loss. No call returns, so none can raise. So a thread checks the collectives in flight:
NCCL's own state (a broken connection) and the time that they take. It *aborts* the communicator, the one call that
is allowed beside another; the kernels end, streams continue, and the next call or wait raises with the reason. The
values that the streams then compute are invalid, including weights after an optimizer step.
"""

from minddp.transport.nccl.nccl_transport import NcclTransport, connect_gpus

__all__ = ["NcclTransport", "connect_gpus"]
