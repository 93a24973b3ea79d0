r"""All-reduce among the ranks of one host: every rank can reach every bucket, and no bytes are sent.

[Note: all-reduce in shared memory]
With W ranks each bucket is cut into W chunks, and rank r owns chunk r. An all-reduce is then

      rank 0's bucket   rank 1's bucket   rank 2's bucket
    +-----------------+-----------------+-----------------+
    |     chunk 0     |     chunk 0     |     chunk 0     |   rank 0 reads all three, adds them,
    |- - - - - - - - -|- - - - - - - - -|- - - - - - - - -|   and writes the sum into all three
    |     chunk 1     |     chunk 1     |     chunk 1     |   rank 1
    |- - - - - - - - -|- - - - - - - - -|- - - - - - - - -|
    |     chunk 2     |     chunk 2     |     chunk 2     |   rank 2
    +-----------------+-----------------+-----------------+

This is a reduce-scatter and an all-gather in one sweep. Only its owner touches a chunk meanwhile, so the ranks
synchronise only twice: "my addend is ready" before the owners begin, "my chunk is done" before the results are
read. The owner processes one block of all buckets at a time that fits into the second-level cache, so that the
operands are still there when they are overwritten.

The order in which an owner adds decides the bits: `addition_order.py`. How ranks wait, and notice that one has
died: `host_communicator.py`. Which thread adds: `shared_work.py`.
"""

from minddp.transport.shared_memory.rendezvous import CannotConnect
from minddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport, connect_ranks

__all__ = ["CannotConnect", "SharedMemoryTransport", "connect_ranks"]
