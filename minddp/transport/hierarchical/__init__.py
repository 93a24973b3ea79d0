r"""All-reduce for groups that span hosts: shared memory within a host, gloo between hosts, and no byte sent twice.

Each bucket is cut into as many chunks as the smallest host has ranks. Chunk i belongs to *lane* i: the ranks that
have local rank i on their host, one of each host. An all-reduce is then

          host A                        host B
     rank 0      rank 1            rank 2      rank 3
    +-------+   +-------+         +-------+   +-------+
    |chunk 0|   |chunk 0|         |chunk 0|   |chunk 0|     lane 0: ranks 0 and 2
    |- - - -|   |- - - -|         |- - - -|   |- - - -|
    |chunk 1|   |chunk 1|         |chunk 1|   |chunk 1|     lane 1: ranks 1 and 3
    +-------+   +-------+         +-------+   +-------+

    1. reduce   in memory, rank 0 adds chunk 0 of ranks 0 and 1, and rank 1 adds their chunk 1; host B does the same
    2. cross    lane 0 all-reduces chunk 0 by gloo, and lane 1 at the same time chunk 1
    3. copy     rank 0 writes chunk 0 into the bucket of rank 1, and rank 1 writes chunk 1 into that of rank 0

Steps 1 and 3 are the all-reduce of `shared_memory/`. With one lane a single rank of each host would do all the
work; with several the ranks share it, and the bytes between the hosts are the same: with H hosts, 2 (H-1)/H of a
bucket leave each, which is the minimum.

[Note: the order of addition between hosts]
The bits are not those of gloo's flat ring, nor of torch's DDP: (a + b) + (c + d) is not ((a + b) + c) + d. But they
are as deterministic, equal on all ranks, and depend only on the placement of the ranks and on the tensor:

    first     the ranks of each host, in the order of gloo in a group of these ranks; in chunk i the last one added
              is the host's local rank i (see `shared_memory/addition_order.py`)
    then      the hosts, in the order of their lowest ranks, in the order of gloo for a chunk among as many ranks
"""

from minddp.transport.hierarchical.hierarchical_transport import HierarchicalTransport, connect_hosts
from minddp.transport.hierarchical.multi_host_communicator import Hosts

__all__ = ["HierarchicalTransport", "Hosts", "connect_hosts"]
