r"""All-reduce between the ranks of one host: the buckets lie where every rank can reach them.

On one host gloo sends the bytes of a bucket through TCP to itself: they are copied into the kernel, out of it,
and added up afterwards. Here each rank's bucket lies in memory that all ranks have mapped, so nothing is sent at
all: a rank adds up its share of the bucket where the others' gradients lie, and writes the sum there too.

[Note: all-reduce in shared memory]
With W ranks each bucket is cut into W chunks, and rank r is the owner of chunk r. An all-reduce is then

      rank 0's bucket   rank 1's bucket   rank 2's bucket
    +-----------------+-----------------+-----------------+
    |     chunk 0     |     chunk 0     |     chunk 0     |   rank 0 reads all three, adds them up,
    |- - - - - - - - -|- - - - - - - - -|- - - - - - - - -|   and writes the sum into all three
    |     chunk 1     |     chunk 1     |     chunk 1     |   rank 1
    |- - - - - - - - -|- - - - - - - - -|- - - - - - - - -|
    |     chunk 2     |     chunk 2     |     chunk 2     |   rank 2
    +-----------------+-----------------+-----------------+

It is a reduce-scatter (each rank gets the sum of its chunk) and an all-gather (each gets the other sums) in one
sweep. Nobody but its owner ever touches a chunk meanwhile, so the ranks need to agree only twice: "my gradients
are in" before the owners begin, "my chunk is done" before the results are read. It works through a block of all
buckets at a time that fits into the second-level cache, so that what was read for adding is still there to be
overwritten.

    rank 0   pack ------- "in" ..... add and write chunk 0 .... "done"        wait ......... use
                              \  /                                    \  /
                               \/                                      \/
                               /\                                      /\
    rank 1   pack -------- "in"  ... add and write chunk 1 ...... "done"  ... wait ......... use

What is small and broadcast, such as buffers, goes through the sockets: [Note: broadcasts] in `hearing.py`.

In which order an owner adds decides the bits: [Note: the order of addition] in `order.py`. How ranks tell each
other, wait, and find out that one has died: [Note: telling and waiting] in `exchange.py`; when they do the work:
[Note: who attends] in `attendance.py`. Why nothing is left behind: [Note: memory without a name] in `segments.py`.
How they find each other: `rendezvous.py`.
"""

from minddp.transport.shared_memory.rendezvous import CannotConnect
from minddp.transport.shared_memory.transport import SharedMemoryTransport, connect_ranks

__all__ = ["CannotConnect", "SharedMemoryTransport", "connect_ranks"]
