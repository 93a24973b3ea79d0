r"""All-reduces by NCCL itself, called through CuPy: everything that a process group does, in plain sight.

`torch.distributed` hides what happens between `all_reduce(tensor)` and `work.wait()` in C++. Here it is, in Python:

    meeting.py        the ranks tell each other on which cards they are, and rank 0 makes up the *unique id*, 128
                      bytes that all others fetch from the store; who knows them can join
    communicator.py   each rank joins with its number; from then on the communicator is a stream of its own, and
                      calls that all ranks make in one order. A thread looks after what no call can tell
    transport.py      which NCCL call is made for all-reduce, broadcast and all-gather

[Note: fences]
NCCL's calls only enqueue: the kernel that adds up runs later, on the stream that it was given. Backward is not to
stop for it, so that stream is another one than backward's, and what must not overtake what is said by events:

    backward's stream   pack bucket 0 ──┐ready    pack bucket 1 ──┐              ┌─ unpack
                                        │                         │              │
    the communicator's                  └─> all-reduce 0 ─────────└> all-reduce 1┘done

    1. `ready` is recorded behind all that the caller has asked for, and the communicator's stream waits for it
    2. the collective is enqueued there, and `done` recorded behind it
    3. whoever calls `work.wait()` makes its own stream wait for `done`

The host waits nowhere. So a tensor may be let go of while the device has yet to come to it: the caching allocator
is told that this stream uses it, too (`Tensor.record_stream`), and gives its memory to nobody else before. That
goes for buckets that are dropped with a collective under way. (torch's own group comes to the same by holding the
tensors of each work until somebody has waited for it, or its thread has seen it end.)

[Note: what no call can tell]
A rank that dies leaves the others' kernels spinning for ever, and with them the stream that waits for `done`, and
the host as soon as it reads a loss. Nothing returns, so nothing can raise. A thread therefore looks at what is
under way: NCCL's own view of it (a connection that broke) and the time that it takes. It *aborts* the
communicator, which is the one call that may be made beside another; the kernels give up, streams run on, and the
next call or wait raises and says why. What the streams then computed is rubbish, weights stepped with it included.

[Note: mean or sum]
The reducer scales by 1/world_size while it packs and asks for sums, as torch's DDP does, so these are the same
operations on the same buffers, and the bits are those of torch's DDP over NCCL as far as NCCL chooses the same way
to add. `all_reduce_together(mean=True)` leaves the scaling to NCCL (ncclAvg): each rank's elements are multiplied
as they are read, by 1/world_size *rounded to the tensor's dtype*, where torch multiplies halves in float32. At
powers of two that is the same; at others not, which is why the reducer does not use it.

Together with `NCCL_HOSTID`, see `meeting.py`, several ranks can share one card, which is of use in tests alone.
"""

from minddp.transport.nccl.transport import NcclTransport, connect_gpus

__all__ = ["NcclTransport", "connect_gpus"]
