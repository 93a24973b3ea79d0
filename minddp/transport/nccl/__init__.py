r"""All-reduces by NCCL itself, called through CuPy: everything that a process group does, in readable Python.

By rank 0's *unique id*, 128 bytes, all ranks join (`unique_id.py`); then they make the same calls in one order.

[Note: fences]
NCCL's calls only enqueue: the kernel that adds runs later, on the stream that was passed. Backward must not stop
for it, so that stream is another one than backward's, and events enforce the order:

    backward's stream   pack bucket 0 ──┐ready    pack bucket 1 ──┐              ┌─ unpack
                                        │                         │              │
    the communicator's                  └─> all-reduce 0 ─────────└> all-reduce 1┘done

    1. `ready` is recorded behind everything that the caller has enqueued; the communicator's stream waits for it
    2. the collective is enqueued there, and `done` is recorded behind it
    3. `work.wait()` makes the calling stream wait for `done`

The host never waits. So a tensor may be dropped before the device has reached it; `Tensor.record_stream` makes the
caching allocator keep its memory until this stream has passed, also for buckets that are dropped with a collective
in flight.

[Note: what no call can report]
When a rank dies the others' kernels spin for ever, and with them the stream that waits for `done`, and the host as
soon as it reads a loss. No call returns, so none can raise. So a thread checks what is in flight: NCCL's own state
(a broken connection) and the time that it takes. It *aborts* the communicator, the one call that is allowed beside
another; the kernels end, streams go on, and the next call or wait raises with the reason. What the streams then
computed is invalid, including weights after an optimizer step.
"""

from minddp.transport.nccl.nccl_transport import NcclTransport, connect_gpus

__all__ = ["NcclTransport", "connect_gpus"]
